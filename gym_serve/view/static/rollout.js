// One rollout: its verdict at the side, and what happened as a conversation, a timeline, tokens, or JSON.
import { Annotation } from "./annotation.js";
import { changed, go, link, shared } from "./address.js";
import { get, isStatic, useAnswer } from "./api.js";
import { Conversation } from "./conversation.js";
import { html, useEffect, useRef, useState } from "./dom.js";
import { count, duration, number, short, times } from "./format.js";
import { useKeys } from "./keys.js";
import { Markdown } from "./markdown.js";
import { nameOf, Problem, Reward } from "./parts.js";
import { Raw } from "./raw.js";
import { Folded, Name, Plain } from "./text.js";
import { Timeline } from "./timeline.js";
import { branchName, Tokens } from "./tokens.js";
import { Value } from "./values.js";

const VIEWS = {
  conversation: { title: "Conversation", shows: Conversation },
  timeline: { title: "Timeline", shows: Timeline, has: ({ timeline }) => timeline?.steps?.length > 0 },
  tokens: { title: "Tokens", shows: Tokens },
  judge: { title: "Judge", shows: Judge, has: ({ judge }) => judge?.length > 0 },
  branches: { title: "Branches", shows: Branches, has: ({ branches }) => branches?.length > 1 },
  raw: { title: "JSON", shows: Raw },
};

export function RolloutPage({ address, runs, version }) {
  const [run, n] = address.parts;
  const { data, error, stale } = useAnswer(`rollout/${run}/${n}`, {});
  const { query } = address;
  const [view, setView] = [query.get("view") ?? "conversation", (name) => go(link(["rollout", run, n], changed(query, { view: name === "conversation" ? null : name })), { replace: true })];
  const list = { ...shared(query), sort: query.get("sort") };
  const at = query.has("at") ? Number(query.get("at")) : null;
  const step = async (by) => {
    if (at === null || at + by < 0) return;
    const { rows } = await get("rollouts", { ...list, offset: at + by, limit: 1 });
    if (rows.length > 0) go(link(["rollout", rows[0].run, rows[0].n], changed(query, { at: at + by })));
  };
  const back = link("rollouts", { ...shared(query), sort: query.get("sort") });
  useKeys({
    "]": { does: "next rollout of the list", run: () => step(1) },
    "[": { does: "rollout before", run: () => step(-1) },
    u: { does: "back to the list", run: () => go(back) },
    ...Object.fromEntries(Object.keys(VIEWS).map((name, index) => [String(index + 1), { does: VIEWS[name].title.toLowerCase(), run: () => setView(name) }])),
  });
  if (error) return html`<h1>Rollout</h1><${Problem} error=${error} />`;
  if (!data || stale) return html`<p class="muted pad" role="status">Reading…</p>`;
  const shown = VIEWS[view] && (VIEWS[view].has?.(data) ?? true) ? view : "conversation";
  const Shown = VIEWS[shown].shows;
  return html`
    <div class="title">
      <h1><a class="muted" href=${back}><${Name} limit=${40}>${nameOf(runs, run)}<//></a> <span class="muted" aria-hidden="true">/</span> Rollout <${Name} limit=${40}>${data.id ?? n}<//></h1>
      <span class="steps">${at !== null && html`
        <button class="quiet" disabled=${at === 0} onClick=${() => step(-1)} aria-label="Rollout before">← before</button>
        <span class="muted">${count(at + 1)}</span>
        <button class="quiet" onClick=${() => step(1)} aria-label="Next rollout">next →</button>`}</span></div>
    <div class="rollout">
      <aside class="verdict" aria-label="Verdict"><${Verdict} data=${data} query=${query} />
        <div class="wide-only">${!isStatic && html`<${Annotation} key=${`${run}/${n}`} run=${run} n=${n} />`}</div></aside>
      <div class="content">
        <${Views} views=${VIEWS} data=${data} shown=${shown} to=${(name) => link(["rollout", run, n], changed(query, { view: name === "conversation" ? null : name }))} />
        <${Shown} key=${shown} data=${data} run=${run} n=${n} version=${version} />
        <div class="narrow-only">${!isStatic && html`<${Annotation} key=${`${run}/${n}`} run=${run} n=${n} narrow />`}</div>
      </div>
    </div>`;
}

/** The views as tabs, of which the shown one is scrolled to where they are wider than the window. */
export function Views({ views, data, shown, to }) {
  const nav = useRef();
  useEffect(() => {
    const tab = nav.current.querySelector("[aria-current]");
    nav.current.scrollLeft = tab.offsetLeft - nav.current.offsetLeft - (nav.current.clientWidth - tab.offsetWidth) / 2;
  }, [shown]);
  return html`<nav class="views" ref=${nav} aria-label="Views of this rollout">${Object.entries(views).filter(([, one]) => one.has?.(data) ?? true).map(([name, one]) => html`
    <a href=${to(name)} aria-current=${name === shown ? "page" : null}>${one.title}</a>`)}</nav>`;
}

export function Verdict({ data, query }) {
  const { verdict = {}, failure, summary = {}, neighbours, timeline } = data;
  const components = Object.entries(verdict.reward_components ?? {});
  const { reason, ...others } = verdict.fields ?? {};
  const fields = Object.entries(others);
  const own = Object.entries(data.row ?? {}).filter(([name]) => name !== "agent_ref");
  const attempts = neighbours?.attempts ?? [];
  return html`
    <section class="card"><h2 class="hidden">Verdict</h2>
      <div class="headline"><${Reward} reward=${verdict.reward} failure=${failure?.class} large />
        <span class="muted small">${failure ? "no verdict" : "reward"}<br />task ${data.task} · attempt ${data.attempt ?? 0}</span></div>
      ${reason && html`<div class="reason"><${Plain} text=${String(reason)} of="reason" characters=${600} /></div>`}
      ${components.length > 0 && html`<table class="pairs tight"><tbody>${components.map(([name, value]) => html`<tr><th scope="row"><${Name}>${name}<//></th><td class="number">${number(value)}</td></tr>`)}</tbody></table>`}
      ${failure && html`<${Failure} failure=${failure} />`}
      <dl class="facts">
        ${[["environment", summary.environment], ["agent", summary.agent], ["policy", summary.last_version === summary.version ? summary.version : `${summary.version} to ${summary.last_version}`], ["versions behind", summary.behind > 0 ? summary.behind : null]].map(([name, value]) => value !== null && value !== undefined && value !== "" && html`
          <div><dt>${name}</dt><dd><${Name} limit=${40}>${String(value)}<//></dd></div>`)}
        <div><dt>model calls</dt><dd>${count(summary.turns)}</dd></div>
        <div><dt>tokens</dt><dd>${short(summary.tokens)}</dd></div>
        <div><dt>time</dt><dd>${duration(summary.seconds ?? timeline?.duration)}</dd></div>
      </dl>
    </section>
    <${Keys} title="Verifier" entries=${fields} /><${Keys} title="Row" entries=${own} />
    ${attempts.length > 1 && html`<section class="card"><h2>Attempts at this task</h2>
      <p class="attempts">${attempts.slice(0, 40).map((one) => {
        const here = one.run === data.run && one.n === data.n;
        return html`<a href=${link(["rollout", one.run, one.n], shared(query))} aria-current=${here ? "true" : null} class=${here ? "here" : ""}
          aria-label="Attempt in line ${one.n}: ${one.failure ? "failed" : number(one.reward)}"><${Reward} reward=${one.reward} failure=${one.failure} /></a>`;
      })}${attempts.length > 40 && html`<span class="muted">+${attempts.length - 40}</span>`}</p>
      <${CompareWith} data=${data} attempts=${attempts} /></section>`}`;
}

/** What the verifier says, or what the row has, such as the right answer. */
function Keys({ title, entries }) {
  if (entries.length === 0) return null;
  return html`<section class="card"><details class="plain-details" open=${!matchMedia("(max-width: 900px)").matches}><summary><h2>${title}</h2></summary>
    <table class="pairs tight"><tbody>${entries.slice(0, 60).map(([name, value]) => html`<tr><th scope="row"><${Name} limit=${60}>${name}<//></th><td><${Value} value=${value} depth=${2} /></td></tr>`)}</tbody></table></details></section>`;
}

/** The attempt that says most beside this one: of those with another reward, the most different. */
function CompareWith({ data, attempts }) {
  const others = attempts.filter((one) => one.run !== data.run || one.n !== data.n);
  if (others.length === 0) return null;
  const mine = data.verdict?.reward ?? 0;
  const other = others.reduce((best, one) => (Math.abs((one.reward ?? 0) - mine) > Math.abs((best.reward ?? 0) - mine) ? one : best));
  return html`<a class="small" href=${link(["attempts", data.run, data.n, other.run, other.n])}>${other.failure ? "Compare with an attempt that failed" : (other.reward ?? 0) === mine ? "Compare with another attempt" : `Compare with an attempt that earned ${number(other.reward)}`}</a>`;
}

function Failure({ failure }) {
  return html`<div class="failure"><p><strong><${Name}>${failure.class}<//></strong> <span class="muted">${failure.terminal ? "not tried again" : "may be tried again"}</span></p>
    ${failure.message && html`<${Plain} text=${failure.message} of="message" characters=${600} />`}
    ${failure.trace && html`<details><summary>Trace</summary><${Plain} text=${failure.trace} of="trace" code /></details>`}</div>`;
}

/** What the verifier asked a model, and what that answered. */
export function Judge({ data }) {
  return data.judge.slice(0, 100).map((one, index) => html`<section class="block call" aria-label="Question ${index + 1} to the judge">
    <header><span class="who">Judge</span> <code><${Name} limit=${60}>${one.model ?? ""}<//></code><span class="muted right">${duration(one.seconds)}</span></header>
    <div class="arguments"><p class="small-title">Asked</p><${Plain} text=${one.prompt ?? ""} of="question" lines=${40} characters=${4000} /></div>
    <div class="result"><p class="small-title">Answered</p>${one.answer === null || one.answer === undefined ? html`<p class="muted">The call failed: there is no answer.</p>`
      : html`<${Folded} text=${one.answer} of="answer">${(shown) => html`<${Markdown} text=${shown} />`}<//>`}</div></section>`);
}

/** A rollout whose history was rewritten is a tree: each branch goes on from a part of its parent. */
function Branches({ data, run, n }) {
  const [chosen, choose] = useState(data.branches[0].id);
  const children = (parent) => data.branches.filter((one) => (one.parent ?? null) === parent);
  const known = new Set(data.branches.map(({ id }) => id));
  const roots = data.branches.filter((one) => !known.has(one.parent));
  const node = (branch, depth) => html`<li><button class=${branch.id === chosen ? "on" : "quiet"} aria-pressed=${branch.id === chosen ? "true" : "false"} onClick=${() => choose(branch.id)}>
      ${branchName(branch.id)} <span class="muted">${times(branch.items.length, "item")}</span></button>
    ${depth < 30 && children(branch.id).length > 0 && html`<ul>${children(branch.id).map((one) => node(one, depth + 1))}</ul>`}</li>`;
  const branch = data.branches.find(({ id }) => id === chosen);
  const all = new Map(data.items.map((item, index) => [item.index ?? index, item]));
  const items = branch.items.map((index) => all.get(index)).filter(Boolean);
  return html`<ul class="tree">${roots.map((one) => node(one, 0))}</ul>
    <${Conversation} key=${chosen} data=${{ ...data, items, omitted: 0 }} run=${run} n=${n} />`;
}
