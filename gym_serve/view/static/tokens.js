// The tokens that a trainer sees: what was produced, how likely each was, and what is trained on.
import { get } from "./api.js";
import { html, useEffect, useState } from "./dom.js";
import { count, number, percent, times } from "./format.js";
import { Empty, Problem } from "./parts.js";
import { Name, visible } from "./text.js";

/** The name of one of a rollout's conversations, by its number. */
export const branchName = (id) => (id === 0 ? "What was scored" : `Branch ${id}`);

const TURNS = 20; // of a request
const TOKENS = 3000; // of a turn, until the reader wants more

const SCALES = {
  logprob: { title: "Log-probability", of: (token) => token.logprob, edges: [-0.1, -0.7, -1.6, -3, -5], legend: ["above −0.1", "−0.7", "−1.6", "−3", "−5", "below"], sign: -1 },
  entropy: { title: "Entropy", of: (token) => token.entropy, edges: [0.1, 0.5, 1, 2, 3], legend: ["below 0.1", "0.5", "1", "2", "3", "above"], sign: 1 },
  advantage: { title: "Advantage", of: (token, turn) => turn.advantage },
  version: { title: "Policy version", of: (token) => token.version },
};

function classOf(scale, token, turn, versions) {
  const value = SCALES[scale].of(token, turn);
  if (value === null || value === undefined) return "unknown";
  if (scale === "version") return `v${versions.indexOf(value) % 6}`;
  if (scale === "advantage") return value > 0.5 ? "up2" : value > 0 ? "up1" : value < -0.5 ? "down2" : value < 0 ? "down1" : "p0";
  const { edges, sign } = SCALES[scale];
  const at = edges.findIndex((edge) => value * sign < edge * sign);
  return `p${at < 0 ? edges.length : at}`;
}

export function Tokens({ data, run, n }) {
  const [state, set] = useState({ turns: null, error: null, all: false });
  const [chosenScale, setScale] = useState(null);
  const [here, setHere] = useState(null); // {turn, index}
  const load = async (from) => {
    try {
      const { turns, total, problem } = await get(`rollout/${run}/${n}/tokens`, { from, to: from + TURNS });
      set((before) => ({ turns: [...(from > 0 ? before.turns : []), ...turns], error: null, problem, all: from + turns.length >= (total ?? 0) || turns.length === 0 }));
    } catch (error) {
      set((before) => ({ ...before, error }));
    }
  };
  useEffect(() => void load(0), [run, n]);
  const { turns, error, all } = state;
  if (error) return html`<${Problem} error=${error} />`;
  if (turns === null) return html`<p class="muted pad" role="status">Reading…</p>`;
  const tokens = turns.flatMap((turn) => turn.tokens);
  if (tokens.length === 0 && state.problem)
    return html`<${Empty} title="These tokens cannot be read"><${Name} limit=${400}>${state.problem}<//><//>`;
  if (tokens.length === 0)
    return html`<${Empty} title="This rollout has no token ids">Engines in the graph report them; a <code>chat_model</code> does with <code>return_token_ids: true</code>.<//>`;
  const has = (name) => turns.some((turn) => turn.tokens.some((token) => SCALES[name].of(token, turn) !== null && SCALES[name].of(token, turn) !== undefined));
  const scales = Object.keys(SCALES).filter(has);
  const scale = chosenScale ?? scales[0] ?? "logprob";
  const versions = [...new Set(tokens.map(({ version }) => version).filter((one) => one !== null && one !== undefined))];
  const trained = tokens.filter((token) => token.trained).length;
  const logprobs = tokens.map(({ logprob }) => logprob).filter((one) => one !== null && one !== undefined);
  return html`<div class="tokens">
    <div class="toolbar"><label for="scale">Colour</label><select id="scale" value=${scale} onChange=${(event) => setScale(event.target.value)}>
      ${scales.map((name) => html`<option value=${name} selected=${name === scale}>${SCALES[name].title}</option>`)}</select>
      <${Legend} scale=${scale} versions=${versions} /></div>
    <p class="muted small">${times(tokens.length, "token")}${!all && " so far"}, ${count(trained)} trained on${logprobs.length > 0 && `, mean log-probability ${number(logprobs.reduce((a, b) => a + b, 0) / logprobs.length)}`}.
${trained < tokens.length && html` <span class="token untrained">Struck</span> tokens are masked.`}</p>
    <${Detail} here=${here} turns=${turns} />
    ${turns.map((turn, index) => html`
      ${data.branches.length > 1 && turn.branch !== turns[index - 1]?.branch && html`<h2 class="branch">${branchName(turn.branch)}</h2>`}
      <${TokenTurn} key=${turn.turn} turn=${turn} scale=${scale} versions=${versions} active=${here?.turn === index ? here.index : -1} choose=${(at) => setHere({ turn: index, index: at })} />`)}
    ${state.problem && html`<p class="muted small">Other tokens cannot be read: <${Name} limit=${400}>${state.problem}<//></p>`}
    ${!all && html`<button class="more" onClick=${() => load(turns.length)}>Show more model calls</button>`}
  </div>`;
}

function Legend({ scale, versions }) {
  const entries = scale === "version" ? versions.slice(0, 6).map((version, at) => [`v${at}`, String(version)])
    : scale === "advantage" ? [["up2", "above 0.5"], ["up1", "above 0"], ["p0", "0"], ["down1", "below 0"], ["down2", "below −0.5"]]
      : SCALES[scale].legend.map((text, at) => [`p${at}`, text]);
  return html`<span class="scale-legend">${entries.map(([name, text]) => html`<span class="token ${name}">${visible(text).slice(0, 20)}</span>`)}</span>
    ${scale === "advantage" && html`<span class="muted small">GRPO's, computed from the rewards of this run's attempts at the task</span>`}`;
}

function Detail({ here, turns }) {
  const token = here && turns[here.turn]?.tokens[here.index];
  return html`<div class="token-detail" role="status">${token ? html`
    <code>${token.text === null ? `#${token.id}` : JSON.stringify(visible(token.text)).slice(0, 60)}</code>
    <span>id <strong>${token.id}</strong></span>
    ${token.logprob !== null && token.logprob !== undefined && html`<span>log-prob <strong>${number(token.logprob, 4)}</strong> (${percent(Math.exp(token.logprob))})</span>`}
    ${token.entropy !== null && token.entropy !== undefined && html`<span>entropy <strong>${number(token.entropy)}</strong></span>`}
    ${token.version !== null && token.version !== undefined && html`<span>version <strong><${Name} limit=${20}>${String(token.version)}<//></strong></span>`}
    <span>${token.trained ? "trained on" : "masked"}</span>` : html`<span class="muted">Point at a token, or choose one with the arrow keys: its id and probability stand here.</span>`}</div>`;
}

function TokenTurn({ turn, scale, versions, active, choose }) {
  const [limit, setLimit] = useState(TOKENS);
  const { tokens } = turn;
  const chosen = (event) => {
    const index = event.target.dataset?.index;
    if (index !== undefined) choose(Number(index));
  };
  const onKeyDown = (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    choose(Math.max(0, Math.min(tokens.length - 1, active + by)));
    event.preventDefault();
  };
  return html`<section class="block token-turn" aria-label="Model call ${turn.turn + 1}">
    <header><span class="who">Model call ${turn.turn + 1}</span><span class="muted">${times(turn.prompt_tokens ?? 0, "prompt token")}${turn.reused > 0 && `, ${count(turn.reused)} of them from the call before`}</span>
      ${turn.drift > 0 && html`<span class="reward partial" title="The prompt does not begin with the tokens of the call before">drift: ${times(turn.drift, "token")}</span>`}
      ${turn.advantage !== null && turn.advantage !== undefined && html`<span class="muted right" title="GRPO's: the reward less the mean of this run's attempts at the task, divided by their deviation">advantage ${number(turn.advantage)}</span>`}</header>
    <div class="token-text" dir="auto" tabindex="0" role="group" aria-label="Tokens of model call ${turn.turn + 1}" onMouseOver=${chosen} onClick=${chosen} onKeyDown=${onKeyDown}>
      ${tokens.slice(0, limit).map((token, index) => html`<span key=${index} data-index=${index} class="token ${classOf(scale, token, turn, versions)} ${token.trained ? "" : "untrained"} ${index === active ? "active" : ""} ${token.text === null ? "id" : ""}">${token.text === null || token.text === undefined ? token.id : visible(token.text)}</span>`)}</div>
    ${tokens.length > limit && html`<button class="more" onClick=${() => setLimit(limit + 10 * TOKENS)}>Show more <span class="muted">${count(tokens.length - limit)} tokens are folded</span></button>`}
    ${turn.generated > tokens.length && html`<p class="muted small">The other ${count(turn.generated - tokens.length)} tokens of this call are in the JSON.</p>`}</section>`;
}
