// JSON as tables: arguments of calls, results, fields of verifiers.
import { html, useState } from "./dom.js";
import { Code } from "./code.js";
import { count, times } from "./format.js";
import { Folded, Name, Plain, visible } from "./text.js";

const ROWS = 40;
const DEPTH = 5;
const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const isScalar = (value) => value === null || typeof value !== "object";

/** A text as JSON, if it is an object or a list. */
export function parsed(text, limit = 200_000) {
  if (typeof text !== "string" || text.length > limit || !/^\s*[[{]/.test(text)) return undefined;
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

function Text({ text }) {
  if (text === "") return html`<span class="muted">(empty)</span>`;
  if (looksLikeCode(text))
    return html`<${Folded} text=${text} of="code">${(shown) => html`<${Code} text=${shown} language=${languageOf(text)} />`}<//>`;
  return text.includes("\n") ? html`<${Plain} text=${text} of="text" />`
    : html`<${Folded} text=${text} of="text" characters=${1000}>${(shown) => html`<bdi class="string">${visible(shown)}</bdi>`}<//>`;
}

const PYTHON = /^\s*(import |from \w+ import |def |class |print\()/m;
const SQL = /^\s*(select|insert|update|delete|with|create)\b[\s\S]*\b(from|into|set|as|table)\b/i;
const languageOf = (text) => (PYTHON.test(text) ? "python" : SQL.test(text) ? "sql" : "");
const looksLikeCode = (text) => languageOf(text.slice(0, 5000)) !== "";

function Scalar({ value }) {
  if (typeof value === "string") return html`<${Text} text=${value} />`;
  return html`<code class="scalar">${value === null ? "null" : String(value)}</code>`;
}

function Rows({ entries, render }) {
  const [limit, setLimit] = useState(ROWS);
  const rest = entries.length - limit;
  return html`${entries.slice(0, limit).map(render)}
    ${rest > 0 && html`<tr><td colspan="9"><button class="more" onClick=${() => setLimit(limit + 200)}>
      Show more <span class="muted">${count(rest)} are folded</span></button></td></tr>`}`;
}

/** Objects that all have the same few scalar keys are the rows of one table. */
function keysOfAll(list) {
  if (list.length < 2 || !list.every(isObject)) return null;
  const keys = Object.keys(list[0]);
  const same = list.every((one) => Object.keys(one).join("\n") === keys.join("\n") && Object.values(one).every(isScalar));
  return same && keys.length > 0 && keys.length <= 8 ? keys : null;
}

/** The style of a column of names: as wide as the longest one, within reason. */
export const widthOf = (entries) => ({ minWidth: `${Math.min(24, Math.max(...entries.slice(0, 500).map(([key]) => String(key).length)) + 3)}ch` });

/** JSON as text; what is nested more deeply than the browser can write is only named. */
export function asText(value, indent = undefined) {
  try {
    return JSON.stringify(value, null, indent);
  } catch {
    return "(nested too deeply to be shown)";
  }
}

export function Value({ value, depth = 0 }) {
  if (isScalar(value)) return html`<${Scalar} value=${value} />`;
  const entries = Array.isArray(value) ? value.map((one, at) => [at, one]) : Object.entries(value);
  if (entries.length === 0) return html`<code class="scalar">${Array.isArray(value) ? "[]" : "{}"}</code>`;
  if (depth >= DEPTH) return html`<${Plain} text=${asText(value)} of="value" code />`;
  const keys = Array.isArray(value) && keysOfAll(value);
  if (keys)
    return html`<div class="wide"><table class="grid"><thead><tr>${keys.map((key) => html`<th scope="col"><${Name}>${key}<//></th>`)}</tr></thead>
      <tbody><${Rows} entries=${value} render=${(one) => html`<tr>${keys.map((key) => html`<td><${Scalar} value=${one[key]} /></td>`)}</tr>`} /></tbody></table></div>`;
  if (Array.isArray(value) && value.every((one) => isScalar(one) && String(one).length < 40) && value.length <= 60)
    return html`<span class="list">${value.map((one) => html`<code class="scalar"><bdi>${visible(typeof one === "string" ? one : JSON.stringify(one))}</bdi></code>`)}</span>`;
  const table = html`<table class="pairs"><tbody><${Rows} entries=${entries}
    render=${([key, one]) => html`<tr><th scope="row" style=${widthOf(entries)}><${Name}>${String(key)}<//></th><td><${Value} value=${one} depth=${depth + 1} /></td></tr>`} /></tbody></table>`;
  if (depth < 2) return table;
  return html`<details><summary>${Array.isArray(value) ? times(value.length, "entry", "entries") : times(entries.length, "key")}</summary>${table}</details>`;
}
