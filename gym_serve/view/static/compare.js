// Two runs, or two versions of the policy: which tasks one of them solves and the other does not.
import { changed, go, link } from "./address.js";
import { get, isStatic, useAnswer } from "./api.js";
import { html, useState } from "./dom.js";
import { FilterBox, is } from "./filter.js";
import { count, inOrder, number, times } from "./format.js";
import { coverage, Empty, FailuresAs, nameOf, Problem } from "./parts.js";
import { Name, visible } from "./text.js";

const SHOWN = 200;

export function ComparePage({ address, runs, version }) {
  const { query } = address;
  const left = query.get("left") ?? query.getAll("run")[0] ?? runs[0]?.id;
  const right = query.get("right") ?? query.getAll("run")[1] ?? runs.find(({ id }) => id !== left)?.id;
  const where = query.get("where");
  const figures = useAnswer(left && !isStatic ? "summary" : null, { run: [left, right] }, version);
  const versionsOf = (id) => inOrder(Object.keys(figures.data?.runs.find((run) => run.id === id)?.versions ?? {}).filter(Boolean));
  const sides = { left: { run: left, version: query.get("left_version") }, right: { run: right ?? left, version: query.get("right_version") } };
  if (!right && !sides.left.version && !sides.right.version) [sides.left.version, sides.right.version] = [versionsOf(left)[0], versionsOf(left).at(-1)];
  const two = sides.left.run !== sides.right.run || sides.left.version !== sides.right.version;
  const own = ({ version }) => (version ? is("version", version) : null);
  const { data, error } = useAnswer(left && two ? "compare" : null, { left, right: sides.right.run, where, left_where: own(sides.left), right_where: own(sides.right), failures: query.get("failures") }, version);
  const [limit, setLimit] = useState(SHOWN);
  const show = query.get("show") ?? "flipped";
  const set = (changes) => go(link("compare", changed(query, { left, right, run: null, ...changes })));
  if (runs.length < 2 && (isStatic || (figures.data && versionsOf(left).length < 2)))
    return html`<h1>Compare</h1><${Empty} title="There is one run only, of one policy version">Open two files to compare them: <code>gym-serve view one.jsonl other.jsonl</code>. Attempts at the same task are compared from a rollout's page.<//>`;
  const tasks = (data?.tasks ?? []).filter((task) => show === "all" || (show === "flipped" ? task.flipped : task.flipped === show));
  const picker = (name, { run: value }) => html`<label>${name === "left" ? "Run" : "with"} <select aria-label="${name} run" value=${value} onChange=${(event) => set({ [name]: event.target.value, [`${name}_version`]: null })}>
    ${runs.map((run) => html`<option value=${run.id} selected=${run.id === value}>${visible(run.name).slice(0, 60)}</option>`)}</select></label>
    ${versionsOf(value).length > 1 && html`<select aria-label="${name} policy version" onChange=${(event) => set({ left_version: sides.left.version, right_version: sides.right.version, [`${name}_version`]: event.target.value })}>
      <option value="" selected=${!sides[name].version}>all versions</option>
      ${versionsOf(value).map((one) => html`<option value=${one} selected=${one === sides[name].version}>version ${visible(one).slice(0, 30)}</option>`)}</select>`}`;
  const swapped = { left: sides.right.run, right: sides.left.run, left_version: sides.right.version, right_version: sides.left.version };
  const title = ({ run, version }) => html`<${Name} limit=${24}>${nameOf(runs, run)}<//>${version && html` <span class="muted">version <${Name} limit=${20}>${version}<//></span>`}`;
  return html`<h1>Compare</h1>
    <div class="toolbar">${picker("left", sides.left)} ${picker("right", sides.right)} <button class="quiet" onClick=${() => set(swapped)}>Swap</button></div>
    <${FilterBox} address=${address} error=${error} />
    ${error && error.position === undefined && html`<${Problem} error=${error} />`}
    ${!two && figures.data && html`<${Empty} title="Both sides are the same">Choose another run, or another version of the policy.<//>`}
    ${data && two && html`
      <p class="muted">${["left", "right"].map((name, index) => html`${index ? " · " : ""}<${Name} limit=${24}>${nameOf(runs, sides[name].run)}<//>: ${coverage(data.coverage?.[name])}`)}${!isStatic && html` · <${FailuresAs} query=${query} set=${set} />`}</p>
      ${data.other_prompt > 0 && html`<p class="warning">${times(data.other_prompt, "task")} left out: the number is the same on both sides, but the prompt is not, so they are of different data sets. <code>gym-serve diff --key FIELD</code> pairs tasks by a field of their rows.</p>`}
      <div class="cards tiles">
        <div class="card tile"><span class="figure">${signed(data.difference?.mean)}</span><span class="muted">mean reward, difference${data.difference?.interval && html`<br /><span title="95 % confidence interval: ${data.interval_method}">${signed(data.difference.interval[0])} to ${signed(data.difference.interval[1])}</span>`}</span></div>
        <div class="card tile"><span class="figure good-text">${count(data.counts.better)}</span><span class="muted">tasks better</span></div>
        <div class="card tile"><span class="figure bad-text">${count(data.counts.worse)}</span><span class="muted">tasks worse</span></div>
        <div class="card tile"><span class="figure">${count(data.counts.same)}</span><span class="muted">the same</span></div>
        ${(data.counts.only_left > 0 || data.counts.only_right > 0) && html`<div class="card tile"><span class="figure">${count(data.counts.only_left)} · ${count(data.counts.only_right)}</span><span class="muted">only in one of them</span></div>`}
      </div>
      <div class="toolbar" role="group" aria-label="Tasks that are shown">${[["flipped", "Flipped"], ["better", "Better"], ["worse", "Worse"], ["all", "All"]].map(([name, title]) => html`
        <button class=${show === name ? "on" : "quiet"} aria-pressed=${show === name ? "true" : "false"} onClick=${() => set({ show: name === "flipped" ? null : name })}>${title}</button>`)}
        <span class="muted">${times(tasks.length, "task")}</span></div>
      ${tasks.length === 0 ? html`<${Empty} title=${data.tasks.length === 0 ? "No task is on both sides" : "No task flipped"}>A task flips if one side solves it more often than not, and the other does not.<//>` : html`
      <div class="wide" tabindex="0" role="region" aria-label="Tasks"><table class="grid compare"><thead><tr><th scope="col">task</th><th scope="col" class="number">${title(sides.left)}</th><th scope="col" class="number">${title(sides.right)}</th><th scope="col">change</th><th scope="col">prompt</th></tr></thead>
        <tbody>${tasks.slice(0, limit).map((task) => html`<${Task} key=${task.task} task=${task} sides=${sides} own=${own} />`)}</tbody></table></div>
        ${tasks.length > limit && html`<button class="more" onClick=${() => setLimit(limit + 500)}>Show more <span class="muted">${count(tasks.length - limit)} tasks</span></button>`}`}`}`;
}

const signed = (value) => (value > 0 ? "+" : "") + number(value, 3).replace("-", "−");

function Task({ task, sides, own }) {
  const { left, right } = sides;
  const side = (one) => (one ? html`<strong>${number(one.mean, 3)}</strong> <span class="muted" title="the mean reward of its attempts">n = ${count(one.attempts)}</span>` : html`<span class="muted">–</span>`);
  const where = is("task", task.task);
  const open = async (event) => {
    event.preventDefault();
    const [{ rows: [a] }, { rows: [b] }] = await Promise.all([left, right].map((one, index) => get("rollouts", { run: one.run, where: [where, own(one)].filter(Boolean).join(" and "), sort: (task.flipped === "worse") === (index === 0) ? "-reward" : "reward", limit: 1 })));
    if (a && b) go(link(["attempts", a.run, a.n, b.run, b.n]));
  };
  return html`<tr><th scope="row"><a href=${link("rollouts", { run: [...new Set([left.run, right.run])], where })} onClick=${task.left && task.right && !isStatic ? open : null}><${Name}>${String(task.task)}<//></a></th>
    <td class="number">${side(task.left)}</td><td class="number">${side(task.right)}</td>
    <td>${task.flipped ? html`<span class="reward ${task.flipped === "better" ? "good" : "bad"}">${task.flipped === "better" ? "▲ better" : "▼ worse"}</span>` : html`<span class="muted">–</span>`}</td>
    <td class="prompt"><${Name} limit=${160}>${task.prompt}<//></td></tr>`;
}
