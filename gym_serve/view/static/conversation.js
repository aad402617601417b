// What was said and done, as people read it: calls stand with their results, and long or routine parts are folded.
import { get } from "./api.js";
import { html, useEffect, useMemo, useRef, useState } from "./dom.js";
import { bytes, count, duration, short, times } from "./format.js";
import { useKeys } from "./keys.js";
import { Markdown } from "./markdown.js";
import { Part } from "./media.js";
import { Folded, Name, Plain } from "./text.js";
import { parsed, Value, widthOf } from "./values.js";

const BATCH = 60; // blocks that are drawn at once
const WINDOW = 500; // items of a request for those left out

/** Items as blocks: a call with its result is one, in the place of the call. */
function blocksOf(items) {
  const results = new Map();
  for (const item of items) if (item.kind === "result" && item.call_id !== null) results.set(item.call_id, item);
  const called = new Set(items.filter(({ kind }) => kind === "call").map((item) => item.call_id));
  const taken = new Set();
  const blocks = [];
  for (const item of items) {
    if (item.kind === "call") {
      const result = results.get(item.call_id);
      if (result && !taken.has(result)) taken.add(result);
      blocks.push({ kind: "call", item, result: result ?? null, turn: item.turn });
    } else if (item.kind !== "result") blocks.push({ kind: item.kind, item, turn: item.turn });
    else if (!taken.has(item) && !called.has(item.call_id)) blocks.push({ kind: "result", item, turn: item.turn });
  }
  return blocks;
}

/** An item that may be cut: the server sends the beginning of a long text, and all of it if the reader asks. */
function Cut({ item, more, children }) {
  const [whole, setWhole] = useState(null);
  return html`${children(whole ?? item)}${whole === null && more.cut.has(item.index) && html`<button class="more" onClick=${async () => setWhole(await more.load(item))}>
    Load the whole text <span class="muted">${bytes(item.bytes)}</span></button>`}`;
}

const WHO = { user: "User", assistant: "Assistant", system: "System", developer: "Developer", tool: "Tool" };

export function Conversation({ data, run, n, source = false }) {
  const [filled, setFilled] = useState([]); // items of the gap that were asked for
  const [asSource, setSource] = useState(source);
  const [limit, setLimit] = useState(BATCH);
  const [active, setActive] = useState(-1);
  const list = useRef();
  const end = useRef();
  // The server leaves out the middle of a very long conversation: `head` items come before the gap.
  const head = data.omitted > 0 ? Math.ceil(data.items.length / 2) : data.items.length;
  const items = useMemo(() => [...data.items.slice(0, head), ...filled], [data, filled]);
  const tail = useMemo(() => data.items.slice(head), [data]);
  const gap = (data.omitted ?? 0) - filled.length;
  const blocks = useMemo(() => [...blocksOf(items), ...(gap > 0 ? [{ kind: "gap", count: gap }] : []), ...blocksOf(tail)], [items, tail, gap]);
  const models = useMemo(() => (data.timeline?.steps ?? []).filter((step) => step.kind === "model" && !step.stage), [data]);
  useEffect(() => {
    if (!end.current || limit >= blocks.length) return undefined;
    const seen = new IntersectionObserver((entries) => entries.some((one) => one.isIntersecting) && setLimit((now) => now + BATCH), { rootMargin: "1200px" });
    seen.observe(end.current);
    return () => seen.disconnect();
  }, [limit, blocks.length]);
  const fill = async () => {
    const from = head + filled.length;
    const answer = await get(`rollout/${run}/${n}`, { from, to: Math.min(from + WINDOW, head + data.omitted) });
    setFilled([...filled, ...answer.items]);
    setLimit((now) => now + answer.items.length);
  };
  const move = (by) => {
    const shown = list.current.querySelectorAll(":scope > .block");
    const next = Math.max(0, Math.min(shown.length - 1, active + by));
    setActive(next);
    shown[next]?.scrollIntoView({ block: "start" });
    shown[next]?.focus({ preventScroll: true });
  };
  const more = useMemo(() => ({
    cut: new Set((data.cut ?? []).map((name) => /^items\[(\d+)\]/.exec(name)?.[1]).filter(Boolean).map(Number)),
    load: async (item) => (await get(`rollout/${run}/${n}`, { from: item.index, to: item.index + 1 })).items[0],
  }), [data]);
  const foldAll = (open) => list.current.querySelectorAll("details").forEach((one) => (one.open = open));
  useKeys({
    j: { does: "next part of the conversation", run: () => move(1) },
    k: { does: "part before", run: () => move(-1) },
    e: { does: "unfold all", run: () => foldAll(true) },
    E: { does: "fold all", run: () => foldAll(false) },
    m: { does: "Markdown or its source", run: () => setSource((now) => !now) },
    G: { does: "end of the conversation", run: () => { setLimit(Infinity); requestAnimationFrame(() => scrollTo({ top: document.body.scrollHeight })); } },
  });
  let turn = null;
  return html`<div class="conversation" ref=${list}>
    <div class="toolbar"><button class="quiet" onClick=${() => foldAll(true)}>Unfold all</button><button class="quiet" onClick=${() => foldAll(false)}>Fold all</button>
      <button class="quiet" aria-pressed=${asSource ? "true" : "false"} onClick=${() => setSource(!asSource)}>Source of Markdown</button></div>
    <${Given} data=${data} />
    ${blocks.slice(0, limit).map((block, index) => {
      const starts = block.turn !== null && block.turn !== undefined && block.turn !== turn;
      if (starts) turn = block.turn;
      return html`${starts && html`<${Turn} key=${`turn${index}`} turn=${block.turn} step=${models[block.turn]} />`}
        <${Block} key=${index} block=${block} asSource=${asSource} fill=${fill} more=${more} />`;
    })}
    ${limit < blocks.length && html`<p ref=${end} class="muted pad">${times(blocks.length - limit, "more part")}…
      <button onClick=${() => setLimit(Infinity)} hidden=${blocks.length > 5000}>Show all</button></p>`}
    ${blocks.length === 0 && !data.instructions && html`<p class="muted pad">Nothing was said in this rollout.</p>`}
  </div>`;
}

/** What the model was given besides the conversation: instructions and tools, folded. */
function Given({ data }) {
  const tools = data.tools ?? [];
  return html`
    ${data.instructions && html`<details class="block system"><summary><span class="who">Instructions</span> <span class="muted">${bytes(data.instructions.length)}</span>
    <span class="muted peek"><${Name} limit=${140}>${firstWords(data.instructions)}<//></span></summary><${Plain} text=${data.instructions} of="text" /></details>`}
    ${tools.length > 0 && html`<details class="block system"><summary><span class="who">${times(tools.length, "tool")}</span> <span class="muted"><${Name} limit=${90}>${tools.map(({ name }) => name).join(", ")}<//></span></summary>
      ${tools.slice(0, 200).map((tool) => html`<${Tool} tool=${tool} />`)}</details>`}`;
}

function Tool({ tool }) {
  const properties = tool.parameters?.properties;
  const isTable = properties && typeof properties === "object" && Object.values(properties).every((one) => one && typeof one === "object");
  const required = Array.isArray(tool.parameters?.required) ? tool.parameters.required : [];
  return html`<div class="tool"><p><code><${Name}>${tool.name}<//></code></p>${tool.description && html`<${Plain} text=${String(tool.description)} of="text" lines=${6} characters=${500} />`}
    ${isTable ? html`<table class="pairs tight"><tbody>${Object.entries(properties).map(([name, one]) => html`<tr><th scope="row" style=${widthOf(Object.entries(properties))}><${Name}>${name}<//></th>
      <td><code>${typeof one.type === "string" ? one.type : JSON.stringify(one.type ?? one.anyOf ?? {})}</code>${required.includes(name) ? "" : html` <span class="muted">optional</span>`}${one.description && html` <${Name} limit=${400}>${String(one.description)}<//>`}</td></tr>`)}</tbody></table>`
      : tool.parameters && html`<${Value} value=${tool.parameters} depth=${2} />`}</div>`;
}

function Turn({ turn, step }) {
  return html`<div class="turn muted"><span>Model call ${turn + 1}</span>${step && html`<span>${duration(step.duration)}</span>
    ${step.output_tokens !== null && step.output_tokens !== undefined && html`<span>${short(step.input_tokens)} → ${times(step.output_tokens, "token")}</span>`}
    ${step.version !== null && step.version !== undefined && html`<span>version <${Name} limit=${20}>${String(step.version)}<//></span>`}
    ${step.retries > 0 && html`<span>${times(step.retries, "retry", "retries")}</span>`}`}</div>`;
}

function Block({ block, asSource, fill, more }) {
  const { kind, item } = block;
  if (kind === "gap") return html`<div class="block gap" tabindex="-1"><button onClick=${fill}>Show ${count(Math.min(block.count, WINDOW))} of ${count(block.count)} parts that are left out</button></div>`;
  if (kind === "call") return html`<${Call} call=${item} result=${block.result} more=${more} />`;
  if (kind === "result") return html`<section class="block call" tabindex="-1" aria-label="Result"><header><span class="who">Result without a call</span> <${Name} limit=${60}>${item.name ?? item.call_id ?? ""}<//></header><${Output} item=${item} more=${more} /></section>`;
  if (kind === "reasoning") return html`<details class="block reasoning" tabindex="-1"><summary><span class="who">Reasoning</span> <span class="muted">${bytes(item.bytes ?? item.text?.length)}</span>
    <span class="muted peek"><${Name} limit=${140}>${firstWords(item.text)}<//></span></summary><${Body} item=${item} asSource=${asSource} more=${more} /></details>`;
  if (item.role === "system" || item.role === "developer") return html`<details class="block system" tabindex="-1"><summary><span class="who">${WHO[item.role]}</span> <span class="muted">${bytes(item.bytes ?? item.text?.length)}</span>
    <span class="muted peek"><${Name} limit=${140}>${firstWords(item.text)}<//></span></summary><${Body} item=${item} asSource=${asSource} more=${more} /></details>`;
  return html`<section class="block ${item.role === "user" ? "user" : "assistant"}" tabindex="-1" aria-label=${WHO[item.role] ?? "Item"}>
    <header><span class="who">${WHO[item.role] ?? html`<${Name} limit=${30}>${item.role ?? "Item"}<//>`}</span>${kind === "other" && html` <span class="muted"><${Name} limit=${40}>${item.name ?? "an item of another kind"}<//></span>`}</header>
    <${Body} item=${item} asSource=${asSource} more=${more} /></section>`;
}

const firstWords = (text) => (text ?? "").slice(0, 300).replace(/\s+/g, " ").trim();

function Body({ item, asSource, more }) {
  return html`<${Cut} item=${item} more=${more}>${(whole) => html`<${Parts} item=${whole} asSource=${asSource} />`}<//>`;
}

function Parts({ item, asSource }) {
  const parts = item.parts?.length ? item.parts : [{ type: "text", text: item.text }];
  return parts.slice(0, 200).map((part) => (part.type === "text" || part.type === "refusal"
    ? html`${part.type === "refusal" && html`<p class="muted">The model refused:</p>`}<${Text} text=${part.text} asSource=${asSource} />`
    : html`<${Part} part=${part} />`));
}

/** Text of a model or user: Markdown, or its source. */
function Text({ text, asSource }) {
  if (!text) return html`<p class="muted">(empty)</p>`;
  if (asSource) return html`<${Plain} text=${text} of="text" lines=${80} characters=${8000} code />`;
  return html`<${Folded} text=${text} of="text" lines=${80} characters=${8000}>${(shown) => html`<${Markdown} text=${shown} />`}<//>`;
}

function Call({ call, result, more }) {
  const failed = result && /^\s*\{\s*"error"/.test((result.text ?? "").slice(0, 40));
  return html`<section class="block call" tabindex="-1" aria-label="Call of ${call.name}">
    <header><span class="who">Call</span> <code class="callee"><${Name} limit=${80}>${call.name}<//></code>${failed && html` <span class="reward bad">error</span>`}
      <span class="muted right">${result ? bytes(result.bytes ?? result.text?.length) : "no result"}</span></header>
    <div class="arguments"><p class="hidden">Arguments</p><${Cut} item=${call} more=${more}>${(whole) => html`<${Arguments} call=${whole} />`}<//></div>
    ${result && html`<div class="result"><p class="small-title">Result</p><${Output} item=${result} more=${more} /></div>`}
  </section>`;
}

function Arguments({ call }) {
  return call.arguments !== null && call.arguments !== undefined && typeof call.arguments === "object"
    ? html`<${Value} value=${call.arguments} />` : html`<${Plain} text=${call.arguments_text ?? ""} of="arguments" lines=${12} code />`;
}

function Output({ item, more }) {
  return html`<${Cut} item=${item} more=${more}>${(whole) => html`<${Result} item=${whole} />`}<//>`;
}

function Result({ item }) {
  const value = parsed(item.text);
  const media = (item.parts ?? []).filter((part) => part.type !== "text");
  return html`${value !== undefined ? html`<${Value} value=${value} />` : item.text ? html`<${Plain} text=${item.text} of="result" lines=${16} characters=${2000} code />` : media.length === 0 && html`<p class="muted">(empty)</p>`}
    ${media.slice(0, 50).map((part) => html`<${Part} part=${part} />`)}`;
}
