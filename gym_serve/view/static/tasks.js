// Tasks: the attempts at each stand beside one another.
import { changed, go, link, shared } from "./address.js";
import { get, url, useAnswer } from "./api.js";
import { html, useCallback, useState } from "./dom.js";
import { FilterBox, is } from "./filter.js";
import { number, short, times } from "./format.js";
import { Bar, Empty, Reward } from "./parts.js";
import { Table } from "./table.js";
import { Name } from "./text.js";

const BESIDE = 8; // attempts that are shown of a task; of more, one less, so that the rest's number fits

const shownOf = (rollouts) => rollouts.slice(0, rollouts.length > BESIDE ? BESIDE - 1 : BESIDE);

export function TasksPage({ address, version }) {
  const { query } = address;
  const run = query.getAll("run");
  const where = query.get("where");
  const sort = query.get("sort") ?? "";
  const [answer, setAnswer] = useState(null);
  const probe = useAnswer("tasks", { run, where, limit: 1 }, version);
  const set = (changes) => go(link("tasks", changed(query, changes)));
  const fetchRows = useCallback((offset, limit, signal) => get("tasks", { run, where, sort, offset, limit }, signal), [url("", { run, where, sort })]);
  const ofTask = (row) => link("rollouts", { ...shared(query), where: is("task", row.task) });
  const attempts = (row) => html`<span class="attempts">${shownOf(row.rollouts).map((one) => html`<a href=${link(["rollout", one.run, one.n], shared(query))}
    aria-label="Attempt ${one.n}: ${one.failure ? "failed" : number(one.reward)}"><${Reward} reward=${one.reward} failure=${one.failure} /></a>`)}
    ${row.rollouts.length > BESIDE && html`<span class="muted">+${row.rollouts.length - shownOf(row.rollouts).length}</span>`}</span>`;
  const solved = (row) => html`<span class="solved nowrap"><${Bar} share=${row.scored ? row.solved / row.scored : 0} colour="var(--good-line)" /> <span>${row.solved}/${row.scored}${row.attempts > row.scored && html` <span class="muted" title="${row.attempts} attempts, those that failed included">of ${row.attempts}</span>`}</span></span>`;
  const columns = () => [
    { key: "task", name: "task", sort: "task", width: "72px", cell: (row) => html`<a href=${ofTask(row)}><${Name}>${String(row.task)}<//></a>` },
    { key: "solved", name: "solved", title: "attempts with a reward of 1 or more, of those with a score", sort: "solved", width: "150px", cell: solved },
    { key: "mean", name: "mean", sort: "mean_reward", width: "70px", number: true, cell: (row) => number(row.mean_reward, 3) },
    { key: "spread", name: "spread", title: "the highest reward less the lowest", sort: "spread", width: "70px", number: true, cell: (row) => number(row.spread, 3) },
    { key: "longest", name: "longest", title: "the tokens of the longest attempt", sort: "longest", width: "76px", number: true, cell: (row) => short(row.longest) },
    { key: "prompt", name: "prompt", width: "minmax(200px, 1fr)", least: 200, cell: (row) => html`<${Name} limit=${200}>${row.prompt}<//>` },
    { key: "attempts", name: "attempts", width: "minmax(300px, 1.2fr)", least: 300, cell: attempts },
  ];
  const narrowCell = (row) => html`<a href=${ofTask(row)}><strong>Task <${Name}>${String(row.task)}<//></strong></a> <span class="right">${solved(row)}</span>
    <span class="line"><${Name} limit=${120}>${row.prompt}<//></span><span class="line">${attempts(row)}</span>`;
  return html`<h1>${answer ? times(answer.total, "task") : "Tasks"}</h1>
    <${FilterBox} address=${address} error=${probe.error} />
    <${Table} label="Tasks" name=${url("tasks", { run, where, sort })} version=${version} columns=${columns} fetchRows=${fetchRows}
      sort=${sort} setSort=${(next) => set({ sort: next })} onAnswer=${setAnswer} narrowCell=${narrowCell} narrowHeight=${98}
      empty=${html`<${Empty} title=${where ? "No task matches the filter" : "There are no tasks yet"}>The page follows the files.<//>`} />`;
}
