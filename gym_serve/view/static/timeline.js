// Where the time of a rollout went: a bar for each step, where and as long as it ran.
import { html, useState } from "./dom.js";
import { count, duration, short } from "./format.js";
import { Name, visible } from "./text.js";

const SHOWN = 200;
const KINDS = { seed: "seed", model: "model", tool: "tool", verify: "verify" };
const colour = (kind) => `var(--step-${KINDS[kind] ?? "other"})`;

export function Timeline({ data }) {
  const [limit, setLimit] = useState(SHOWN);
  const { steps, duration: total, queued } = data.timeline;
  const whole = Math.max(total ?? 0, ...steps.slice(0, 5000).map((step) => step.start + step.duration), 1e-6);
  const kinds = Object.keys(KINDS).map((kind) => {
    const own = steps.filter((step) => step.kind === kind && !step.stage);
    return { kind, seconds: own.reduce((sum, step) => sum + step.duration, 0), queued: own.reduce((sum, step) => sum + (step.queued ?? 0), 0), count: own.length };
  }).filter((one) => one.count > 0);
  return html`<section class="timeline" aria-label="Timeline">
    <ul class="legend">${kinds.map((one) => html`<li><span class="dot" style=${{ background: colour(one.kind) }}></span>${one.kind} <strong>${duration(one.seconds)}</strong>
      <span class="muted">${count(one.count)} ${one.count === 1 ? "step" : "steps"}${one.queued > 0 && `, ${duration(one.queued)} in queues`}</span></li>`)}
      <li>whole <strong>${duration(total)}</strong>${queued > 0 && html` <span class="muted">after ${duration(queued)} in a queue</span>`}</li></ul>
    <table class="waterfall"><thead><tr><th scope="col">step</th><th scope="col" class="number">time</th><th scope="col"><span class="scale muted"><span>0</span><span>${duration(whole / 2)}</span><span>${duration(whole)}</span></span></th></tr></thead>
      <tbody>${steps.slice(0, limit).map((step) => html`<${Step} step=${step} whole=${whole} />`)}</tbody></table>
    ${steps.length > limit && html`<button class="more" onClick=${() => setLimit(limit + 500)}>Show more <span class="muted">${count(steps.length - limit)} steps are folded</span></button>`}
  </section>`;
}

function Step({ step, whole }) {
  const at = (seconds) => `${Math.max(0, Math.min(100, (seconds / whole) * 100))}%`;
  const facts = [
    step.server && `at ${step.server}`, step.queued > 0 && `${duration(step.queued)} in a queue`,
    step.output_tokens !== null && step.output_tokens !== undefined && `${short(step.input_tokens)} → ${short(step.output_tokens)} tokens`,
    step.version !== null && step.version !== undefined && `version ${step.version}`, step.retries > 0 && `${step.retries} retried`,
    step.status && step.status !== 200 && `status ${step.status}`,
  ].filter(Boolean).join(" · ");
  return html`<tr><th scope="row">${step.kind}${step.stage && ` for ${step.stage}`} ${step.name && html`<code><${Name} limit=${30}>${step.name}<//></code>`}<span class="muted facts-line">${visible(facts)}</span></th>
    <td class="number">${duration(step.duration)}</td>
    <td class="track" aria-hidden="true"><span class="span" title=${visible(facts)} style=${{ left: at(step.start), width: `max(2px, ${at(step.duration)})`, background: colour(step.kind) }}>
      ${step.queued > 0 && html`<span class="queued" style=${{ width: `${Math.min(100, (step.queued / (step.duration || 1)) * 100)}%` }}></span>`}</span></td></tr>`;
}
