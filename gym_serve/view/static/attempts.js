// Two attempts side by side: what both did stands in both columns, what differs is marked word by word.
import { link } from "./address.js";
import { useAnswer } from "./api.js";
import { html, useMemo, useState } from "./dom.js";
import { duration, number, short } from "./format.js";
import { nameOf, Problem, Reward } from "./parts.js";
import { foldAt, Name, visible } from "./text.js";
import { asText } from "./values.js";
import differences from "./vendor/diff.js";

const ITEMS = 400; // of each attempt
const TEXT = 20_000; // characters of an item; longer ones are compared as a whole

const textOf = (item) => (item.kind === "call" ? `${item.name}(${item.arguments_text ?? asText(item.arguments)})` : item.text ?? "");
const titleOf = (item) => ({ call: "call", result: "result", reasoning: "reasoning" })[item.kind] ?? item.role ?? "item";
const isSame = (one, other) => titleOf(one) === titleOf(other) && textOf(one) === textOf(other);

/** Pairs of items in order: equal ones, or two of a kind that differ, or one alone. */
function paired(left, right) {
  const pairs = [];
  const parts = differences.diffArrays(left, right, { comparator: isSame, timeout: 500 }) ?? [{ value: left, removed: true }, { value: right, added: true }];
  let [a, b] = [[], []];
  const flush = () => {
    while (a.length || b.length) {
      if (a.length && b.length && titleOf(a[0]) !== titleOf(b[0])) {
        if (a.length >= b.length) pairs.push([a.shift(), null]);
        else pairs.push([null, b.shift()]);
      } else pairs.push([a.shift() ?? null, b.shift() ?? null]);
    }
  };
  for (const part of parts) {
    if (part.removed) a = a.concat(part.value);
    else if (part.added) b = b.concat(part.value);
    else {
      flush();
      for (const item of part.value) pairs.push([item, item, true]);
    }
  }
  flush();
  return pairs;
}

export function AttemptsPage({ address, runs }) {
  const [leftRun, leftN, rightRun, rightN] = address.parts;
  const left = useAnswer(`rollout/${leftRun}/${leftN}`);
  const right = useAnswer(`rollout/${rightRun}/${rightN}`);
  const [onlyDifferent, setOnly] = useState(false);
  const pairs = useMemo(() => (left.data && right.data ? paired(left.data.items.slice(0, ITEMS), right.data.items.slice(0, ITEMS)) : []), [left.data, right.data]);
  const error = left.error ?? right.error;
  if (error) return html`<h1>Two attempts</h1><${Problem} error=${error} />`;
  if (!left.data || !right.data) return html`<p class="muted pad" role="status">Reading…</p>`;
  const shown = pairs.filter(([, , same]) => !onlyDifferent || !same);
  return html`<h1>Two attempts${left.data.task === right.data.task && html` at task <${Name}>${String(left.data.task)}<//>`}</h1>
    <div class="toolbar"><label><input type="checkbox" checked=${onlyDifferent} onChange=${() => setOnly(!onlyDifferent)} /> Only what differs</label>
      <span class="muted">${pairs.filter(([, , same]) => same).length} of ${pairs.length} parts are the same</span></div>
    <div class="side-by-side"><${Head} data=${left.data} runs=${runs} side="is-left" /><${Head} data=${right.data} runs=${runs} side="is-right" />
      ${shown.map(([a, b, same], index) => html`<${Pair} key=${index} a=${a} b=${b} same=${same} />`)}</div>
    <${Fields} left=${left.data} right=${right.data} />`;
}

function Head({ data, runs, side }) {
  return html`<div class="card attempt-head ${side}"><${Reward} reward=${data.verdict?.reward} failure=${data.failure?.class} large />
    <span><a href=${link(["rollout", data.run, data.n])}>Rollout <${Name} limit=${30}>${data.id}<//></a><br /><span class="muted small"><${Name} limit=${40}>${nameOf(runs, data.run)}<//> · ${short(data.summary?.tokens)} tokens · ${duration(data.summary?.seconds)}</span></span></div>`;
}

function Pair({ a, b, same }) {
  const [all, setAll] = useState(false);
  const words = useMemo(() => {
    if (same || !a || !b) return null;
    const [one, other] = [textOf(a), textOf(b)];
    return one.length + other.length > TEXT ? null : differences.diffWordsWithSpace(one, other, { timeout: 200 }) ?? null;
  }, [a, b, same]);
  const side = (item, other, name) => {
    if (!item) return html`<div class="side-item nothing ${name}"><span class="hidden">Nothing here.</span></div>`;
    const text = textOf(item);
    const end = all ? Math.min(text.length, 100_000) : foldAt(text, same ? 4 : 30, same ? 300 : 3000);
    const kind = same ? "same" : other ? "differs" : "alone";
    return html`<div class="side-item ${kind} ${name}"><h2><span class="who">${titleOf(item)}</span>${!same && html` <span class="muted small">${other ? "differs" : "only here"}</span>`}</h2>
      <div class="plain prose" dir="auto">${words && end >= text.length ? words.filter((part) => (name === "is-left" ? !part.added : !part.removed)).map((part) => (part.added || part.removed
        ? html`<${name === "is-left" ? "del" : "ins"}>${visible(part.value)}<//>` : visible(part.value))) : visible(text.slice(0, end))}</div>
      ${end < text.length && html`<button class="more" onClick=${() => setAll(true)}>Show all</button>`}</div>`;
  };
  return html`${side(a, b, "is-left")}${side(b, a, "is-right")}`;
}

/** The verifier's fields of both, the different ones marked. */
function Fields({ left, right }) {
  const [a, b] = [left, right].map(({ verdict }) => ({ reward: verdict?.reward, ...verdict?.reward_components, ...verdict?.fields }));
  const names = [...new Set([...Object.keys(a), ...Object.keys(b)])].slice(0, 100);
  const text = (value) => (value === undefined ? "–" : typeof value === "number" ? number(value) : typeof value === "string" ? value : asText(value));
  return html`<section class="block"><h2>Verdicts</h2><div class="wide" tabindex="0" role="region" aria-label="Fields of both verdicts"><table class="grid"><thead><tr><th scope="col">field</th><th scope="col">left</th><th scope="col">right</th></tr></thead>
    <tbody>${names.map((name) => html`<tr class=${text(a[name]) === text(b[name]) ? "" : "differs"}><th scope="row"><${Name} limit=${60}>${name}<//></th><td><${Name} limit=${300}>${text(a[name])}<//></td><td><${Name} limit=${300}>${text(b[name])}<//></td></tr>`)}</tbody></table></div></section>`;
}
