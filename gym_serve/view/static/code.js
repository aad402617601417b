// Code with its syntax in colours. The highlighter gives a tree, which becomes elements: no HTML is parsed.
import { within } from "./budget.js";
import { h, html } from "./dom.js";
import { visible } from "./text.js";
import highlighter from "./vendor/highlight.js";

const LIMIT = 20_000; // characters; longer code stays plain
const PART = 2_000; // characters that are highlighted at once: some patterns take the square of the length

function element(node) {
  if (typeof node === "string") return visible(node);
  const children = node.children.map(element);
  return node.scope ? h("span", { class: `hl-${node.scope.split(".")[0]}` }, children) : children;
}

function coloured(text, language) {
  if (text.length > LIMIT || !highlighter.getLanguage(language ?? "")) return visible(text);
  return parts(text).map((part) => part.length > PART ? visible(part) : within(() => tree(part, language), () => visible(part)));
}

const tree = (text, language) =>
  element(highlighter.highlight(text, { language, ignoreIllegals: true })._emitter.rootNode);

/** A text in parts of whole lines; a longer line is a part of its own, which stays plain. */
function parts(text) {
  const found = [""];
  for (const line of text.split(/(?<=\n)/)) {
    if (found.at(-1).length + line.length > PART) found.push("");
    found[found.length - 1] += line;
  }
  return found;
}

/** A block of code; `language` as in Markdown's fences. */
export function Code({ text, language }) {
  return html`<pre class="code" dir="ltr"><code>${coloured(text, language)}</code></pre>`;
}
