// LaTeX as MathML, which browsers draw by themselves: no fonts, no style attributes. KaTeX gives a tree of it.
import { h, html } from "./dom.js";
import { visible } from "./text.js";
import katex from "./vendor/katex.js";

const LIMIT = 5000; // characters of a formula
const OPTIONS = { output: "mathml", throwOnError: true, strict: "ignore", trust: false, maxExpand: 200, maxSize: 20 };
const ELEMENTS = new Set(
  ("math semantics mrow mi mn mo ms mtext mspace mfrac msqrt mroot msub msup msubsup munder mover munderover " +
    "mmultiscripts mprescripts mtable mtr mtd mlabeledtr mpadded mphantom mstyle").split(" "),
);
const ATTRIBUTES = new Set(
  ("display displaystyle scriptlevel mathvariant mathcolor mathbackground mathsize stretchy fence separator accent " +
    "accentunder lspace rspace linethickness columnalign rowspacing columnspacing columnlines rowlines frame notation " +
    "width height depth voffset movablelimits symmetric minsize maxsize largeop form").split(" "),
);

function element(node) {
  if (node.text !== undefined) return visible(node.text);
  if (node.type === undefined && node.children === undefined) return node.character ?? ""; // a space
  if (node.type === "annotation") return null; // the source, which screen readers would read a second time
  const children = (node.children ?? []).map(element);
  if (node.type === "menclose") return h("mrow", { class: "boxed" }, children); // browsers draw no menclose
  if (!ELEMENTS.has(node.type)) return children;
  const attributes = Object.entries(node.attributes ?? {}).filter(([name]) => ATTRIBUTES.has(name));
  return h(node.type, Object.fromEntries(attributes), children);
}

/** A formula, or its source if it is none. */
export function Formula({ source, display = false }) {
  if (source.length <= LIMIT) {
    try {
      const tree = katex.__renderToDomTree(source, { ...OPTIONS, displayMode: display });
      return html`<span class=${display ? "formula block" : "formula"}>${element(tree)}</span>`;
    } catch {
      // no LaTeX that KaTeX knows
    }
  }
  return html`<code class="formula">${visible(source)}</code>`;
}
