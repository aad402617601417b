// One episode while it runs: what is said and done appears turn by turn, and it can be stopped.
import { changed, go, link, useAddress } from "./address.js";
import { get, send, usePoll } from "./api.js";
import { Conversation } from "./conversation.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "./dom.js";
import { count, short } from "./format.js";
import { useKeys } from "./keys.js";
import { since, State } from "./live_episodes.js";
import { Problem } from "./parts.js";
import { Raw } from "./raw.js";
import { Judge, Verdict, Views } from "./rollout.js";
import { Name } from "./text.js";
import { Timeline } from "./timeline.js";

const VIEWS = {
  conversation: { title: "Conversation", shows: Conversation },
  timeline: { title: "Timeline", shows: Timeline, has: ({ timeline }) => timeline?.steps?.length > 0 },
  judge: { title: "Judge", shows: Judge, has: ({ judge }) => judge?.length > 0 },
  raw: { title: "JSON", shows: Raw },
};
const NEAR = 160; // pixels from the end of the page: a reader who is there stays there
const BACK = link("episodes");

/** Ask for what is new: the items behind those that are here, unless nothing has changed. */
const asking = (id) => async (signal, before) => {
  const all = before === null || before.items.length >= before.total;
  const answer = await get(`rollout/${id}/0`, { from: before?.items.length ?? 0, known: before !== null && all ? before.live.version : null }, signal);
  if (answer.items === undefined) return { ...before, live: answer.live };
  const items = answer.from === 0 || before === null ? answer.items : [...before.items.slice(0, answer.from), ...answer.items];
  return { ...answer, items, final: answer.live.state === "ended" };
};

export function EpisodePage({ id }) {
  const { data, error } = usePoll(asking(id), id);
  const { query } = useAddress();
  const view = query.get("view") ?? "conversation";
  const show = (name) => go(link(["episode", id], changed(query, { view: name === "conversation" ? null : name })), { replace: true });
  const question = useRef();
  const live = data?.live;
  const runs = live && live.state !== "ended" && !(error?.status === 404);
  useKeys({
    u: { does: "back to the list", run: () => go(BACK) },
    s: { does: "stop the episode", run: () => runs && question.current.showModal() },
    ...Object.fromEntries(Object.keys(VIEWS).map((name, index) => [String(index + 1), { does: VIEWS[name].title.toLowerCase(), run: () => show(name) }])),
  });
  useFollowing(data?.items.length ?? 0, runs && view === "conversation");
  if (data === null) return html`<h1><a class="muted" href=${BACK}>Episodes</a> <span class="muted" aria-hidden="true">/</span> Episode</h1>
    ${error ? html`<${Problem} error=${error} />` : html`<p class="muted pad" role="status">Reading…</p>`}`;
  const shown = VIEWS[view] && (VIEWS[view].has?.(data) ?? true) ? view : "conversation";
  const Shown = VIEWS[shown].shows;
  return html`
    <div class="title"><h1><a class="muted" href=${BACK}>Episodes</a> <span class="muted" aria-hidden="true">/</span> <${Name} limit=${60}>${String(live.rollout_id ?? id)}<//></h1>
      ${runs && html`<button class="danger" disabled=${live.state === "stopping"} onClick=${() => question.current.showModal()}>Stop</button>`}</div>
    ${error && html`<${Problem} error=${error} />`}
    <div class="rollout">
      <aside class="verdict" aria-label=${runs ? "State" : "Verdict"}>${runs || error?.status === 404 ? html`<${Now} live=${live} gone=${!runs} />` : html`<${Verdict} data=${data} query=${query} />`}</aside>
      <div class="content">
        <${Views} views=${VIEWS} data=${data} shown=${shown} to=${(name) => link(["episode", id], changed(query, { view: name === "conversation" ? null : name }))} />
        <${Shown} key=${shown === "raw" ? `raw ${live.version}` : shown} data=${data} run=${id} n=${0} />
        ${runs && shown === "conversation" && html`<p class="going muted"><span class="pulse" aria-hidden="true"></span><${State} episode=${live} /> ${since(live.state_seconds)}</p>`}
        <p class="hidden" role="status">${runs ? `It runs, with ${count(live.turns)} model calls so far.` : "It has ended."}</p>
      </div>
    </div>
    <${StopQuestion} id=${id} dialog=${question} />`;
}

/** A reader at the end of the page sees what is appended there. */
function useFollowing(length, follows) {
  const atEnd = useRef(false);
  useEffect(() => {
    const look = () => { atEnd.current = scrollY > 0 && innerHeight + scrollY >= document.documentElement.scrollHeight - NEAR; };
    addEventListener("scroll", look, { passive: true });
    return () => removeEventListener("scroll", look);
  }, []);
  useLayoutEffect(() => {
    if (follows && atEnd.current) scrollTo({ top: document.documentElement.scrollHeight });
  }, [length]);
}

function Now({ live, gone }) {
  return html`<section class="card"><h2 class="hidden">State</h2>
    <div class="headline">${gone ? html`<span class="state other">gone</span>` : html`<${State} episode=${live} />`}
      <span class="muted small">${gone ? "it is not known any more" : `for ${since(live.state_seconds)}`}</span></div>
    <dl class="facts">
      <div><dt>agent</dt><dd><${Name} limit=${40}>${live.agent}<//></dd></div>
      ${live.task !== null && html`<div><dt>task</dt><dd><${Name} limit=${20}>${String(live.task)}<//> · ${live.attempt ?? 0}</dd></div>`}
      <div><dt>model calls</dt><dd>${count(live.turns)}</dd></div>
      <div><dt>tokens</dt><dd>${short(live.input_tokens)} → ${short(live.output_tokens)}</dd></div>
      <div><dt>age</dt><dd>${since(live.seconds)}</dd></div>
    </dl></section>`;
}

function StopQuestion({ id, dialog }) {
  const [error, set] = useState(null);
  const stop = async () => {
    try {
      await send("DELETE", `../episodes/${encodeURIComponent(id)}`);
      set(null);
      dialog.current.close();
    } catch (thrown) {
      set(thrown);
    }
  };
  return html`<dialog ref=${dialog} aria-labelledby="stop-title" onClose=${() => set(null)}>
    <h2 id="stop-title">Stop this episode?</h2>
    <p>Its model request and its tools are cancelled, and its session is closed. Whoever asked for it gets what it has done so far, as a failure (<code>stopped</code>): it is masked, and not tried again.</p>
    ${error && html`<${Problem} error=${error} />`}
    <p class="buttons"><button onClick=${() => dialog.current.close()}>Let it run</button><button class="danger" onClick=${stop}>Stop it</button></p>
  </dialog>`;
}
