// A graph that runs: its episodes appear turn by turn, and its servers show their load.
import { ApiError, headers, send, url } from "./api.js";
import { html, useEffect, useRef, useState } from "./dom.js";
import { count, duration, number, percent, times } from "./format.js";
import { Bar, Empty, Problem, Reward } from "./parts.js";
import { Name, Plain } from "./text.js";

const ENDED = 30; // episodes that have ended and are still shown
const AGAIN = 2000; // milliseconds until a broken stream is opened again

/** Events of a text/event-stream. EventSource cannot send the token, so it is read by hand. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5)).join("\n");
      if (data) yield JSON.parse(data);
    }
  }
}

function changedBy(state, event) {
  const episodes = new Map(state.episodes);
  if (event.event === "pressure") return { ...state, pressure: event };
  const before = episodes.get(event.id) ?? { id: event.id, turns: 0, since: Date.now() / 1000 };
  if (event.event === "turn") episodes.set(event.id, { ...before, ...event, turns: event.turn === undefined ? before.turns + 1 : event.turn + 1 });
  else if (event.event === "end") episodes.set(event.id, { ...before, ...event, ended: true });
  else episodes.set(event.id, { ...before, ...event });
  const ended = [...episodes.values()].filter((one) => one.ended);
  for (const old of ended.slice(0, Math.max(0, ended.length - ENDED))) episodes.delete(old.id);
  return { ...state, episodes };
}

export function LivePage() {
  const [state, set] = useState({ episodes: new Map(), pressure: null, error: null, open: false });
  const [said, say] = useState("");
  const queue = useRef([]);
  useEffect(() => {
    const controller = new AbortController();
    let timer;
    const flush = setInterval(() => {
      const events = queue.current.splice(0);
      if (events.length) set((before) => events.reduce(changedBy, before));
    }, 250); // one drawing for all events of a quarter of a second
    const open = async () => {
      try {
        const response = await fetch(url("live"), { headers: headers(), signal: controller.signal });
        if (!response.ok) throw new ApiError(response.status);
        set((before) => ({ ...before, error: null, open: true }));
        for await (const event of events(response)) queue.current.push(event);
      } catch (error) {
        if (error.name === "AbortError") return;
        set((before) => ({ ...before, error, open: false }));
      }
      timer = setTimeout(open, AGAIN);
    };
    open();
    return () => {
      controller.abort();
      clearTimeout(timer);
      clearInterval(flush);
    };
  }, []);
  const stop = async (id) => {
    try {
      await send("POST", `live/${encodeURIComponent(id)}/cancel`, {});
      say(`Stopped ${id}.`);
    } catch (error) {
      say(error.message);
    }
  };
  const all = [...state.episodes.values()].reverse();
  const running = all.filter((one) => !one.ended);
  const ended = all.filter((one) => one.ended);
  return html`<h1>${times(running.length, "running episode")}</h1>
    ${state.error && html`<${Problem} error=${state.error} />`}
    <p class="muted" role="status">${said || (state.open ? "" : "Connecting…")}</p>
    <${Pressure} pressure=${state.pressure} />
    ${running.length === 0 && state.open && html`<${Empty} title="No episode runs">Episodes appear here as soon as they begin.<//>`}
    <div class="episodes">${running.slice(0, 200).map((one) => html`<${Episode} key=${one.id} episode=${one} stop=${stop} />`)}</div>
    ${ended.length > 0 && html`<h2>Ended</h2><div class="episodes">${ended.map((one) => html`<${Episode} key=${one.id} episode=${one} />`)}</div>`}`;
}

function Episode({ episode, stop = null }) {
  return html`<section class="card episode" aria-label="Episode ${episode.id}"><header>
      ${episode.ended && html`<${Reward} reward=${episode.reward} failure=${episode.failure} />`}
      <strong><${Name} limit=${30}>${String(episode.id)}<//></strong> <span class="muted"><${Name} limit=${30}>${episode.agent ?? ""}<//> · ${times(episode.turns, "turn")}${episode.seconds !== undefined && html` · ${duration(episode.seconds)}`}</span>
      ${stop && html`<button class="quiet right" onClick=${() => stop(episode.id)} aria-label="Stop episode ${episode.id}">Stop</button>`}</header>
    ${episode.text && html`<${Plain} text=${String(episode.text)} of="turn" lines=${6} characters=${500} />`}</section>`;
}

function Pressure({ pressure }) {
  const servers = Object.entries(pressure?.servers ?? {});
  if (servers.length === 0) return null;
  return html`<section class="block"><h2>Load</h2><ul class="bars">${servers.map(([name, one]) => html`<li><span><${Name} limit=${30}>${name}<//></span>
    <${Bar} share=${one.load} colour=${one.load >= 1 ? "var(--bad-line)" : "var(--accent)"} /><span class="value">${percent(one.load)} <span class="muted">${count(one.running)} running, ${number(one.waiting, 0)} waiting</span></span></li>`)}</ul></section>`;
}
