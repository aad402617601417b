// What the verifier asked a model, and what that answered.
import { html } from "./dom.js";
import { duration } from "./format.js";
import { Markdown } from "./markdown.js";
import { Folded, Name, Plain } from "./text.js";

export function Judge({ data }) {
  return data.judge.slice(0, 100).map((one, index) => html`<section class="block call" aria-label="Question ${index + 1} to the judge">
    <header><span class="who">Judge</span> <code><${Name} limit=${60}>${one.model ?? ""}<//></code><span class="muted right">${duration(one.seconds)}</span></header>
    <div class="arguments"><p class="small-title">Asked</p><${Plain} text=${one.prompt ?? ""} of="question" lines=${40} characters=${4000} /></div>
    <div class="result"><p class="small-title">Answered</p>${one.answer === null || one.answer === undefined ? html`<p class="muted">The call failed: there is no answer.</p>`
      : html`<${Folded} text=${one.answer} of="answer">${(shown) => html`<${Markdown} text=${shown} />`}<//>`}</div></section>`);
}
