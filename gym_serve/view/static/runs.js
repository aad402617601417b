// Runs side by side: a column each.
import { changed, go, link } from "./address.js";
import { isStatic, useAnswer } from "./api.js";
import { Histogram, Lines } from "./charts.js";
import { html } from "./dom.js";
import { bytes, count, duration, inOrder, number, percent, short, times } from "./format.js";
import { FilterBox, is } from "./filter.js";
import { Bar, colourOf, coverage, Empty, FailuresAs, nameOf, Problem } from "./parts.js";
import { Name, visible } from "./text.js";

export function RunsPage({ address, runs, version }) {
  const run = address.query.getAll("run");
  const where = address.query.get("where");
  const { data, error, loading } = useAnswer("summary", { run, where, failures: address.query.get("failures") }, version);
  if (runs.length === 0)
    return html`<${Empty} title="There are no rollouts yet">This page follows the files: it fills as soon as <code>gym-serve collect</code> writes.<//>`;
  const colour = (id) => colourOf(runs.findIndex((one) => one.id === id));
  const shown = data?.runs ?? [];
  return html`
    <h1>${times(shown.length || runs.length, "run")}</h1>
    <${FilterBox} address=${address} error=${error} />
    ${error && error.position === undefined && html`<${Problem} error=${error} />`}
    ${data && !isStatic && html`<p class="muted"><${FailuresAs} query=${address.query} set=${(changes) => go(link("runs", changed(address.query, changes)))} /></p>`}
    ${data && html`
      <div class=${loading ? "loading" : ""}>
        <div class="cards">${shown.map((one) => html`<${Card} key=${one.id} summary=${one}
          run=${runs.find(({ id }) => id === one.id)} colour=${colour(one.id)} where=${where} />`)}</div>
        <div class=${shown.length <= 3 ? "beside" : ""}><${Comparison} shown=${shown} runs=${runs} colour=${colour} />
          <div><${OverTime} shown=${shown} runs=${runs} colour=${colour} /><${PassAtK} shown=${shown} runs=${runs} colour=${colour} /></div></div>
      </div>`}`;
}

function interval(summary) {
  if (!summary.interval) return null;
  const [low, high] = summary.interval;
  return `${number(low, 3)} to ${number(high, 3)}`;
}

const METHODS = { wilson: "by Wilson's method over tasks", bootstrap: "by a bootstrap over tasks" };

function Card({ summary, run, colour, where }) {
  const query = { run: summary.id, where };
  const problems = run?.problem_count ?? 0;
  const choose = (low, high, last) => {
    const range = `reward >= ${low} and reward ${last ? "<=" : "<"} ${high}`;
    go(link("rollouts", { ...query, where: where ? `(${where}) and ${range}` : range }));
  };
  return html`<section class="card" aria-label=${visible(run?.name ?? summary.id)}>
    <h2><span class="dot" style=${{ background: colour }}></span><a href=${link("rollouts", query)}><${Name} limit=${60}>${run?.name ?? summary.id}<//></a></h2>
    <p class="muted small">${times(summary.rollouts, "rollout")}${run && html` · ${bytes(run.bytes)}${!run.done && " · being written"}`}</p>
    ${summary.rollouts === 0 ? html`<p class="muted">No rollouts${where ? " match the filter" : " in this file yet"}.</p>` : html`
      <div class="headline"><span class="figure">${number(summary.mean_reward, 3)}</span>
        <span class="muted">mean reward, ${coverage(summary)}${interval(summary) && html`<br /><span title="95 % confidence interval, ${METHODS[summary.interval_method]}">${interval(summary)}</span>`}</span></div>
      ${summary.scored > 0 && summary.histogram?.counts.length > 0 && html`<${Histogram} histogram=${summary.histogram} label="Rewards" colour=${colour} choose=${choose} />`}
      <${Failures} summary=${summary} query=${query} />`}
    ${problems > 0 && html`<details class="warning"><summary>${times(problems, "line")} could not be read</summary>
      <ul>${run.problems.slice(0, 20).map(({ line, message }) => html`<li>Line ${count(line)}: <${Name}>${message}<//></li>`)}</ul></details>`}
  </section>`;
}

function Failures({ summary, query }) {
  const entries = Object.entries(summary.failures ?? {}).filter(([name]) => name !== "masked").sort((a, b) => b[1] - a[1]);
  if (entries.length === 0) return html`<p class="muted small">No failures.</p>`;
  const most = Math.max(...entries.map(([, value]) => value));
  return html`<div class="failures"><h3>${times(summary.failed, "failed attempt")} <span class="muted">${percent(summary.failed / summary.rollouts)}</span></h3>
    <ul class="bars">${entries.slice(0, 8).map(([name, value]) => html`<li><a href=${link("rollouts", { ...query, where: is("failure", name) })}><${Name} limit=${40}>${name}<//></a>
      <${Bar} share=${value / most} colour="var(--failed-line)" /><span class="value">${count(value)}</span></li>`)}</ul></div>`;
}

const MEASURES = [
  ["rollouts", (one) => count(one.rollouts)],
  ["scored", (one) => `${count(one.scored)} of ${count(one.asked)}`, null, "Rollouts with a score, of those that were asked for"],
  ["mean reward", (one) => number(one.mean_reward, 4), null, "Of each task, and of these over tasks"],
  ["95 % interval", (one) => interval(one) ?? "–", null, "Wilson's where all rewards are 0 or 1, else a bootstrap over tasks"],
  ["pass@1", (one) => percent(one.pass_at_k?.["1"]), (one) => one.pass_at_k?.["1"] !== undefined, "Where all rewards are 0 or 1"],
  ["masked", (one) => count(one.masked), (one) => one.masked > 0, "Rollouts that their environment leaves out of scores"],
  ["failed rollouts", (one) => count(one.asked - one.scored - one.masked), null, "Rollouts that have no score, since all of their attempts failed"],
  ["failed attempts", (one) => `${count(one.failed)}${one.rollouts ? ` (${percent(one.failed / one.rollouts)})` : ""}`],
  ["model calls, mean", (one) => number(one.turns_mean, 1)],
  ["tokens in", (one) => short(one.tokens?.input)],
  ["tokens out", (one) => short(one.tokens?.output)],
  ["seconds, mean", (one) => duration(one.seconds?.mean)],
  ["seconds, median", (one) => duration(one.seconds?.p50)],
  ["seconds, 90 %", (one) => duration(one.seconds?.p90)],
  ["rollouts a minute", (one) => number(rate(one), 1)],
  ["policy versions", (one) => versions(one)],
  ["versions behind, mean", (one) => number(one.behind?.mean, 2), (one) => one.behind, "How many versions older the first model call's is than the newest one that the run had used when the rollout ended"],
  ["versions behind, most", (one) => count(one.behind?.most), (one) => one.behind],
  ["changed version midway", (one) => `${count(one.straddling)} (${percent(one.straddling / one.rollouts)})`, (one) => one.straddling > 0, "Rollouts whose last model call is of another version than their first one"],
  ["cost", (one) => cost(one, "total"), (one) => one.cost, "In the currency of the prices, judges included"],
  ["cost of a rollout", (one) => cost(one, "per_rollout"), (one) => one.cost],
  ["cost of a solved task", (one) => cost(one, "per_solved_task"), (one) => one.cost, "The whole cost by the number of tasks that a rollout has solved"],
];

function cost({ cost: found }, name) {
  if (!found) return "–";
  const { unpriced, unreported } = found;
  const told = [unpriced.length > 0 && `without ${unpriced.map((one) => visible(one).slice(0, 30)).join(", ")}`, unreported > 0 && `without ${times(unreported, "call")} of unknown usage`].filter(Boolean).join(", ");
  return html`${found[name] === null ? "–" : number(Number(found[name].toPrecision(3)), 9)}${told && found[name] !== null && html`<br /><span class="muted small">${told}</span>`}`;
}

function rate(summary) {
  const points = (summary.over_time ?? []).filter(({ at }) => at !== null);
  if (points.length < 2) return null;
  const seconds = points.at(-1).at - points[0].at;
  return seconds > 0 ? ((points.at(-1).rollouts - points[0].rollouts) / seconds) * 60 : null;
}

function versions(summary) {
  const names = inOrder(Object.keys(summary.versions ?? {}));
  if (names.length === 0) return "–";
  const [first, last] = [names[0], names.at(-1)].map((name) => visible(name).slice(0, 20));
  return names.length === 1 ? first : `${count(names.length)}: ${first} to ${last}`;
}

function Comparison({ shown, runs, colour }) {
  if (!shown.some((one) => one.rollouts > 0)) return null;
  return html`<section class="block"><h2>Measures</h2><div class="wide" tabindex="0" role="region" aria-label="Measures of each run"><table class="grid numbers">
    <thead><tr><th scope="col">measure</th>${shown.map((one) => html`<th scope="col"><span class="dot" style=${{ background: colour(one.id) }}></span><${Name} limit=${30}>${nameOf(runs, one.id)}<//></th>`)}</tr></thead>
    <tbody>${MEASURES.filter(([, , has]) => !has || shown.some(has)).map(([name, of, , title]) => html`<tr><th scope="row" title=${title}>${name}</th>${shown.map((one) => html`<td>${of(one)}</td>`)}</tr>`)}</tbody></table></div></section>`;
}

function Legend({ shown, runs, colour }) {
  return html`<ul class="legend">${shown.map((one) => html`<li><span class="dot" style=${{ background: colour(one.id) }}></span><${Name} limit=${40}>${nameOf(runs, one.id)}<//></li>`)}</ul>`;
}

function OverTime({ shown, runs, colour }) {
  const lines = shown.filter((one) => one.scored > 0 && one.over_time?.length > 1).map((one) => ({
    name: nameOf(runs, one.id), colour: colour(one.id), points: one.over_time.map((point) => [point.rollouts, point.mean_reward]),
  }));
  if (lines.length === 0) return null;
  const label = `Mean reward over rollouts: ${lines.map(({ name, points }) => `${name} from ${number(points[0][1])} to ${number(points.at(-1)[1])}`).join("; ")}`;
  return html`<section class="block"><h2>Mean reward of the rollouts while it ran</h2><${Legend} shown=${shown} runs=${runs} colour=${colour} />
    <${Lines} lines=${lines} label=${label} x="rollouts" y="mean reward" whole /></section>`;
}

function PassAtK({ shown, runs, colour }) {
  const lines = shown.filter((one) => Object.keys(one.pass_at_k ?? {}).length > 1).map((one) => ({
    name: nameOf(runs, one.id), colour: colour(one.id),
    points: Object.entries(one.pass_at_k).map(([k, value]) => [Number(k), value]).sort((a, b) => a[0] - b[0]),
  }));
  if (lines.length === 0) return null;
  const label = `Pass at k: ${lines.map(({ name, points }) => `${name} ${points.map(([k, value]) => `${k}: ${percent(value)}`).join(", ")}`).join("; ")}`;
  return html`<section class="block"><h2>pass@k</h2><p class="muted small">The share of tasks that at least one of k attempts solves.</p>
    <${Legend} shown=${shown} runs=${runs} colour=${colour} /><${Lines} lines=${lines} label=${label} x="k" y="solved" range=${[0, 1.02]} whole /></section>`;
}
