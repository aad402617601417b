// Code with its syntax in colours. The highlighter gives a tree, which becomes elements: no HTML is parsed.
import { h, html } from "./dom.js";
import { visible } from "./text.js";
import highlighter from "./vendor/highlight.js";

const LIMIT = 20_000; // characters; longer code stays plain

function element(node) {
  if (typeof node === "string") return visible(node);
  const children = node.children.map(element);
  return node.scope ? h("span", { class: `hl-${node.scope.split(".")[0]}` }, children) : children;
}

function coloured(text, language) {
  if (text.length > LIMIT || !highlighter.getLanguage(language ?? "")) return visible(text);
  return element(highlighter.highlight(text, { language, ignoreIllegals: true })._emitter.rootNode);
}

/** A block of code; `language` as in Markdown's fences. */
export function Code({ text, language }) {
  return html`<pre class="code" dir="ltr"><code>${coloured(text, language)}</code></pre>`;
}
