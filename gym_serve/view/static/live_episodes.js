// Which episodes run now, which have ended lately, and how loaded the servers are.
import { link } from "./address.js";
import { get, usePoll } from "./api.js";
import { html, useRef } from "./dom.js";
import { count, duration, short, times } from "./format.js";
import { useKeys } from "./keys.js";
import { Bar, Empty, Problem, Reward } from "./parts.js";
import { Name, visible } from "./text.js";

/** What an episode is doing, always as text too. */
export function State({ episode }) {
  const { state, tools = [] } = episode;
  const doing = state === "tool" && tools.length > 0 ? html`${state} <code><${Name} limit=${24}>${tools[0]}<//></code>${tools.length > 1 && ` +${tools.length - 1}`}` : state;
  return html`<span class="state ${STATES.has(state) ? state : "other"}">${doing}</span>`;
}

const STATES = new Set(["seed", "model", "tool", "verify", "queued", "stopping"]);

/** How long something has taken, in full seconds: figures that change need no more. */
export const since = (seconds) => duration(seconds < 120 ? Math.floor(seconds) : seconds);

const to = (episode) => link(["episode", episode.id]);
const ask = async (signal) => get("../episodes", {}, signal);

export function EpisodesPage() {
  const { data, error } = usePoll(ask, "episodes");
  const place = useRef();
  const chosen = useRef(0); // of all links of rows: rows come and go, and the place stays
  const links = () => [...place.current.querySelectorAll("tbody a")];
  const move = (by) => {
    const all = links();
    const now = all.indexOf(document.activeElement);
    const next = all[Math.max(0, Math.min(all.length - 1, now < 0 ? chosen.current : now + by))];
    chosen.current = all.indexOf(next);
    next?.focus();
    next?.scrollIntoView({ block: "nearest" });
  };
  useKeys({
    j: { does: "next episode", run: () => move(1) },
    k: { does: "episode before", run: () => move(-1) },
    G: { does: "last episode", run: () => move(Infinity) },
  });
  if (data === null) return html`<h1>Episodes</h1>${error ? html`<${Problem} error=${error} />` : html`<p class="muted pad" role="status">Reading…</p>`}`;
  const { episodes, ended, running, queued, silent } = data;
  const left = running + queued - episodes.length;
  return html`<div class="title"><h1>${running === 0 ? "No episode runs" : running === 1 ? "1 episode runs" : `${count(running)} episodes run`}${queued > 0 && html` <span class="muted">${count(queued)} queued</span>`}</h1></div>
    ${error && html`<${Problem} error=${error} />`}
    ${silent.length > 0 && html`<p class="warning" role="alert">${times(silent.length, "replica does", "replicas do")} not answer; what ${silent.length === 1 ? "it runs" : "they run"} is missing here:
      ${" "}<${Name} limit=${200}>${silent.join(", ")}<//></p>`}
    <div class="with-side live" ref=${place}>
      <aside class="side" aria-label="Load of the servers"><${Load} /></aside>
      <div class="content">
        ${episodes.length === 0 ? html`<${Empty} title="Waiting for episodes">One appears here as soon as it begins, whoever asks for it.<//>`
          : html`<${Running} episodes=${episodes} />`}
        ${left > 0 && html`<p class="muted pad">The ${times(episodes.length, "oldest one")} of ${count(running + queued)}.</p>`}
        ${ended.length > 0 && html`<h2 class="lately">Ended lately</h2><${Ended} episodes=${ended} />`}
      </div>
    </div>`;
}

function First({ episode }) {
  const { prompt, rollout_id: rollout } = episode;
  const name = html`<${Name} limit=${120}>${prompt || "(no prompt)"}<//>`;
  return html`<td class="prompt">${episode.state === "queued" ? name : html`<a href=${to(episode)}>${name}</a>`}
    <span class="under muted"><${Name} limit=${40}>${episode.agent}<//>${rollout !== null && html` · <${Name} limit=${40}>${String(rollout)}<//>`}
      <span class="narrow-inline"> · ${times(episode.turns, "turn")}</span></span></td>`;
}

function Running({ episodes }) {
  return html`<table class="grid episodes"><caption class="hidden">Episodes that run, the oldest first</caption>
    <thead><tr><th scope="col">episode</th><th scope="col" class="doing">does now</th><th scope="col" class="number extra">turns</th><th scope="col" class="number extra">tokens</th><th scope="col" class="number">age</th></tr></thead>
    <tbody>${episodes.map((episode) => html`<tr key=${episode.id}>
      <${First} episode=${episode} />
      <td class="doing"><${State} episode=${episode} /> <span class="muted small">${since(episode.state_seconds)}</span></td>
      <td class="number extra">${count(episode.turns)}</td>
      <td class="number extra">${short(episode.input_tokens + episode.output_tokens)}</td>
      <td class="number">${since(episode.seconds)}</td></tr>`)}</tbody></table>`;
}

function Ended({ episodes }) {
  return html`<table class="grid episodes"><caption class="hidden">Episodes that have ended, the last one first</caption>
    <thead><tr><th scope="col">episode</th><th scope="col" class="reward-column">reward</th><th scope="col" class="number extra">turns</th><th scope="col" class="number extra">tokens</th><th scope="col" class="number extra">time</th><th scope="col" class="number last">ended</th></tr></thead>
    <tbody>${episodes.map((episode) => html`<tr key=${episode.id}>
      <${First} episode=${episode} />
      <td><${Reward} reward=${episode.reward} failure=${episode.failure} />${episode.failure && html` <span class="muted small extra"><${Name} limit=${24}>${episode.failure}<//></span>`}</td>
      <td class="number extra">${count(episode.turns)}</td>
      <td class="number extra">${short(episode.input_tokens + episode.output_tokens)}</td>
      <td class="number extra">${duration(episode.seconds)}</td>
      <td class="number">${since(episode.ended_seconds)} ago</td></tr>`)}</tbody></table>`;
}

const askLoad = async (signal) => get("../pressure", {}, signal);

/** How loaded each server is, the most loaded one first. */
function Load() {
  const { data, error } = usePoll(askLoad, "pressure", 2);
  if (error && data === null) return error.status === 404 ? null : html`<p class="muted small">The load is unknown: ${visible(error.message)}</p>`;
  if (data === null) return html`<p class="muted small" role="status">Reading the load…</p>`;
  const servers = Object.entries(data.servers).sort(([, one], [, other]) => other.load - one.load);
  const panel = html`<h2 class="wide-only">Load</h2>
    <ul class="load">${servers.map(([name, server]) => html`<li key=${name} class=${name === data.bottleneck ? "bottleneck" : ""}>
      <span class="load-name"><${Name} limit=${40}>${name}<//> <strong class="right">${percentOf(server.load)}</strong></span>
      <${Bar} share=${server.load} colour=${server.load >= 1 ? "var(--bad-line)" : server.load >= 0.8 ? "var(--step-tool)" : "var(--accent)"} />
      <span class="muted small">${facts(server).map((fact) => html`<span>${fact}</span>`)}</span>
      ${name === data.bottleneck && html`<span class="small">bottleneck, by its <${Name} limit=${20}>${data.reason ?? "load"}<//></span>`}</li>`)}</ul>
    ${data.concurrency !== null && html`<p class="muted small">About ${times(data.concurrency, "rollout")} at a time suit this graph now.</p>`}`;
  const worst = data.bottleneck === null ? "idle" : `${data.bottleneck} ${percentOf(data.load)}`;
  return html`<div class="wide-only">${panel}</div>
    <details class="narrow-only"><summary>Load <span class="muted"><${Name} limit=${40}>${worst}<//></span></summary>${panel}</details>`;
}

const percentOf = (load) => `${count(Math.round(load * 100))} %`;

function facts(server) {
  return [
    times(server.replicas, "replica"), server.draining > 0 && `${server.draining} draining`,
    `${count(server.running)} running`, server.waiting > 0 && `${count(server.waiting)} queued`,
    server.sessions > 0 && times(server.sessions, "session"),
    server.refused > 0 && `${percentOf(server.refused)} refused`,
  ].filter(Boolean);
}
