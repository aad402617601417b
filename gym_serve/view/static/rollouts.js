// Rollouts as a table: filtered, sorted, with the verifier's own fields as columns. All of it stands in the URL.
import { changed, go, link, shared } from "./address.js";
import { get, isStatic, url, useAnswer } from "./api.js";
import { Histogram } from "./charts.js";
import { html, useCallback, useState } from "./dom.js";
import { both, Facets, FilterBox } from "./filter.js";
import { count, duration, number, short, times } from "./format.js";
import { useKeys } from "./keys.js";
import { Empty, nameOf, Reward } from "./parts.js";
import { Table } from "./table.js";
import { Name } from "./text.js";
import { asText } from "./values.js";

const CHOSEN = 4; // columns of the verifier that are shown unless the reader chooses, its reason besides

export function RolloutsPage({ address, runs, version }) {
  const { query } = address;
  const run = query.getAll("run");
  const where = query.get("where");
  const sort = query.get("sort") ?? "";
  const [answer, setAnswer] = useState(null);
  const summary = useAnswer("summary", { run, where }, version);
  const set = (changes) => go(link("rollouts", changed(query, changes)));
  const fetchRows = useCallback((offset, limit, signal) => get("rollouts", { run, where, sort, offset, limit }, signal), [url("", { run, where, sort })]);
  const fields = answer?.columns ?? [];
  const several = runs.length > 1 && run.length !== 1;
  const shownFields = query.has("columns") ? query.get("columns").split(",").filter(Boolean) : several ? [] : fields.map(({ name }) => name).filter((name) => name !== "reason").slice(0, CHOSEN);
  const to = (row, index) => link(["rollout", row.run, row.n], { ...shared(query), sort, at: index });
  useKeys({ u: { does: "group by task", run: () => go(link("tasks", shared(query))) } });
  const columns = () => [
    { key: "reward", name: "reward", sort: "reward", width: "76px", cell: (row, index) => html`<a href=${to(row, index)} aria-label="Rollout ${row.id}"><${Reward} reward=${row.reward} failure=${row.failure} /></a>` },
    { key: "task", name: "task", sort: "task", width: "72px", cell: (row) => html`<${Name} limit=${20}>${String(row.task)}<//><span class="muted"> · ${row.attempt ?? 0}</span>` },
    ...(several ? [{ key: "run", name: "run", width: "120px", cell: (row) => html`<${Name} limit=${40}>${nameOf(runs, row.run)}<//>` }] : []),
    { key: "prompt", name: "prompt", width: "minmax(220px, 1fr)", least: 220, cell: (row) => html`<${Name} limit=${200}>${row.prompt}<//>${marks(row)}` },
    ...(fields.some(({ name }) => name === "reason") ? [{ key: "reason", name: "reason", sort: "fields.reason", width: "minmax(200px, 1fr)", least: 200, cell: (row) => fieldCell(row.fields?.reason, 200) }] : []),
    ...(Object.keys(summary.data?.facets?.environment ?? {}).length === 1 ? [] : [{ key: "environment", name: "environment", sort: "environment", width: "132px", cell: (row) => html`<${Name} limit=${40}>${row.environment ?? row.agent}<//>` }]),
    { key: "turns", name: "turns", sort: "turns", width: "58px", number: true, cell: (row) => count(row.turns) },
    ...(Object.keys(summary.data?.facets?.tool ?? {}).length === 0 ? [] : [{ key: "tools", name: "tools", width: "130px", cell: (row) => html`<${Name} limit=${60}>${row.tools?.join(", ") || "–"}<//>` }]),
    { key: "tokens", name: "tokens", sort: "tokens", width: "70px", number: true, cell: (row) => short(row.tokens) },
    { key: "seconds", name: "time", sort: "seconds", width: "74px", number: true, cell: (row) => duration(row.seconds) },
    ...shownFields.map((name) => ({
      key: `fields.${name}`, name, sort: `fields.${name}`, width: "124px", number: fields.find((field) => field.name === name)?.type === "number",
      cell: (row) => fieldCell(row.fields?.[name]),
    })),
  ];
  const narrowCell = (row, index) => html`
    <a href=${to(row, index)}><${Reward} reward=${row.reward} failure=${row.failure} /> <strong><${Name} limit=${20}>${String(row.task)}<//><span class="muted"> · ${row.attempt ?? 0}</span></strong></a>
    <span class="muted right"><${Name} limit=${24}>${row.environment ?? row.agent}<//> · ${times(row.turns ?? 0, "turn")} · ${duration(row.seconds)}</span>
    <span class="line"><${Name} limit=${120}>${row.fields?.reason ?? row.prompt}<//></span>`;
  const histogram = merged(summary.data);
  const narrowed = html`
    ${histogram && html`<section class="facet"><h2>Reward</h2><${Histogram} histogram=${histogram} label="Rewards"
      choose=${(low, high, last) => set({ where: both(where, `reward >= ${low} and reward ${last ? "<=" : "<"} ${high}`) })} /></section>`}
    <${Facets} facets=${summary.data?.facets} where=${where} choose=${(next) => set({ where: next })} />`;
  const error = summary.error;
  return html`
    <div class="title"><h1>${answer ? times(answer.total, "rollout") : "Rollouts"}</h1>
      <${Columns} fields=${fields} shown=${shownFields} choose=${(names) => set({ columns: names.join(",") || "," })} />
      ${!isStatic && html`<a class="quiet button" href=${url("annotations.jsonl", { run })} download="annotations.jsonl">Annotations</a>`}</div>
    <${FilterBox} address=${address} error=${error} />
    <div class="with-side">
      <aside class="side" aria-label="Filter by value"><div class="wide-only">${narrowed}</div>
        <details class="narrow-only"><summary>Filter by value</summary>${narrowed}</details></aside>
      <${Table} label="Rollouts" name=${url("rollouts", { run, where, sort })} version=${version} columns=${columns} fetchRows=${fetchRows}
        sort=${sort} setSort=${(next) => set({ sort: next })} onAnswer=${setAnswer} narrowCell=${narrowCell}
        empty=${html`<${Empty} title=${where ? "No rollout matches the filter" : "There are no rollouts yet"}>
          ${where ? html`<button onClick=${() => set({ where: null })}>Clear the filter</button>` : "The page follows the files."}<//>`} />
    </div>`;
}

const marks = (row) => row.marks?.length > 0 && html` ${row.marks.map((tag) => html`<span class="tag"><${Name} limit=${24}>${tag}<//></span>`)}`;

function fieldCell(value, limit = 60) {
  if (value === null || value === undefined) return html`<span class="muted">–</span>`;
  if (typeof value === "number") return number(value, 3);
  if (typeof value === "boolean") return value ? "yes" : "no";
  return html`<${Name} limit=${limit}>${typeof value === "string" ? value : asText(value)}<//>`;
}

/** One histogram of all runs that have the same edges. */
function merged(summary) {
  const all = (summary?.runs ?? []).filter(({ scored }) => scored > 0).map(({ histogram }) => histogram).filter((one) => one?.counts?.length);
  const same = all.filter(({ edges }) => JSON.stringify(edges) === JSON.stringify(all[0].edges));
  if (same.length === 0) return null;
  return { edges: same[0].edges, counts: same[0].counts.map((_, at) => same.reduce((sum, { counts }) => sum + counts[at], 0)) };
}

function Columns({ fields, shown, choose }) {
  if (fields.length === 0) return null;
  const toggle = (name) => choose(shown.includes(name) ? shown.filter((one) => one !== name) : [...shown, name]);
  return html`<details class="menu"><summary class="button quiet">Columns</summary><fieldset><legend>Fields of the verifier</legend>
    ${fields.slice(0, 60).map(({ name }) => html`<label><input type="checkbox" checked=${shown.includes(name)} onChange=${() => toggle(name)} /> <${Name} limit=${40}>${name}<//></label>`)}</fieldset></details>`;
}
