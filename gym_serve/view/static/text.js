// Text that somebody else wrote: shown as it is, never more of it than a reader asked for.
import { html, useState } from "./dom.js";
import { bytes, count } from "./format.js";

// Characters that change how their neighbours are shown (bidi embeddings and overrides), and control characters.
const HIDDEN = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069]/g;
const name = (character) => `⟨U+${character.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`;

/** The text with characters made visible that would hide or reorder other text. */
export function visible(text) {
  return String(text ?? "").replace(HIDDEN, name);
}

/** One line of a text of unknown origin, isolated from the direction of its neighbours. */
export function Name({ children, limit = 200 }) {
  const text = [children].flat().join("");
  return html`<bdi title=${text.length > limit ? visible(text.slice(0, 2000)) : null}>
    ${visible(text.length > limit ? text.slice(0, limit) + "…" : text)}</bdi>`;
}

const STEP = 200_000;

/** Where a text is folded: after `lines` lines or `characters` characters; its length if it is short. */
export function foldAt(text, lines = 24, characters = 3000) {
  let at = -1;
  for (let line = 0; line < lines; line++) {
    at = text.indexOf("\n", at + 1);
    if (at < 0 || at > characters) return Math.min(text.length, text.length <= characters * 1.3 ? text.length : characters);
  }
  return text.length - at < 200 ? text.length : at;
}

/** A text that is shown in part until the reader wants more. `children` is a function from the shown part. */
export function Folded({ text, lines, characters, of = "text", children }) {
  const start = foldAt(text, lines, characters);
  const [end, setEnd] = useState(start);
  const rest = text.length - end;
  return html`${children(end < text.length ? text.slice(0, end) : text)}
    ${rest > 0 &&
    html`<button class="more" onClick=${() => setEnd(end + STEP)}>
      ${rest > STEP ? `Show ${bytes(STEP)} more` : `Show all`} of this ${of}${" "}
      <span class="muted">${count(rest)} characters are folded</span></button>`}
    ${rest <= 0 && start < text.length &&
    html`<button class="more" onClick=${() => setEnd(start)}>Fold this ${of}</button>`}`;
}

/** Text as it stands, with its line breaks. */
export function Plain({ text, of, lines, characters, code = false }) {
  return html`<${Folded} text=${text} of=${of} lines=${lines} characters=${characters}>
    ${(shown) => (code ? html`<pre class="plain" dir="auto">${visible(shown)}</pre>`
      : html`<div class="prose plain" dir="auto">${visible(shown)}</div>`)}<//>`;
}
