// Small things that several pages show.
import { html } from "./dom.js";
import { count, number } from "./format.js";
import { Name, visible } from "./text.js";

export function Problem({ error }) {
  return html`<div class="problem" role="alert"><strong>${error.status ? `Error ${error.status}` : "This does not work"}</strong>
    <p>${visible(error.message)}</p></div>`;
}

export function Empty({ title, children }) {
  return html`<div class="empty"><p class="big">${title}</p><p class="muted">${children}</p></div>`;
}

/** What a rollout earned, always as text too: colours alone tell some people nothing. */
export function Reward({ reward, failure, large = false }) {
  const kind = failure ? "failed" : reward === null || reward === undefined ? "none"
    : reward >= 1 ? "good" : reward <= 0 ? "bad" : "partial";
  const text = failure ? (failure === "masked" ? "masked" : "failed") : number(reward, 3);
  return html`<span class="reward ${kind} ${large ? "large" : ""}" title=${failure ? visible(failure) : null}>${text}</span>`;
}

/** How many rollouts have a score, of those that were asked for: it stands beside every score. */
export const coverage = (of) => (of ? `${count(of.scored)} of ${count(of.asked)} scored` : "");

/** Chooses what a failed rollout counts as. */
export function FailuresAs({ query, set }) {
  const zero = query.get("failures") === "zero";
  return html`<label class="nowrap"><input type="checkbox" checked=${zero} onChange=${() => set({ failures: zero ? null : "zero" })} /> count failures as 0</label>`;
}

/** Colours of runs, in the order in which they are chosen; see style.css. */
export const colourOf = (index) => `var(--run-${index % 8})`;

export function RunPicker({ runs, chosen, choose }) {
  const all = chosen.length === 0;
  const toggle = (id) => {
    const now = all ? runs.map((run) => run.id) : chosen;
    const next = now.includes(id) ? now.filter((one) => one !== id) : [...now, id];
    choose(next.length === runs.length ? [] : next);
  };
  const boxes = html`<div class="runs" role="group" aria-label="Runs that are shown">
    ${runs.map((run, index) => html`<label class="chip" title=${visible(run.path)}>
      <input type="checkbox" checked=${all || chosen.includes(run.id)} onChange=${() => toggle(run.id)} />
      <span class="dot" style=${{ background: colourOf(index) }}></span>
      <${Name} limit=${40}>${run.name}<//> <span class="muted">${count(run.rollouts)}</span></label>`)}</div>`;
  if (runs.length <= 8 && !(runs.length > 2 && matchMedia("(max-width: 700px)").matches)) return html`<div class="picker">${boxes}</div>`;
  return html`<details class="picker"><summary>${all ? runs.length : chosen.length} of ${runs.length} runs</summary>${boxes}</details>`;
}

export const nameOf = (runs, id) => runs.find((run) => run.id === id)?.name ?? id;

/** A bar whose length is a share of the row's width. */
export function Bar({ share, colour = "var(--accent)" }) {
  return html`<span class="bar" aria-hidden="true"><span style=${{ width: `${Math.max(0, Math.min(1, share || 0)) * 100}%`, background: colour }}></span></span>`;
}
