// Markdown of models. The parser's tokens become elements one by one: HTML in a text stays text, links ask before
// they open, and images are shown only if the text itself contains them (data:).
import { within } from "./budget.js";
import { h, html } from "./dom.js";
import { Code } from "./code.js";
import { Link } from "./link.js";
import { Picture } from "./media.js";
import { visible } from "./text.js";
import katex from "./vendor/katex.js";
import MarkdownIt from "./vendor/markdown-it.js";

const parser = new MarkdownIt({ html: false, linkify: true, breaks: true, maxNesting: 30 });
parser.validateLink = () => true; // nothing is opened or loaded by itself: Link and Picture decide
parser.inline.ruler.before("escape", "formula", inlineFormula);
parser.block.ruler.before("fence", "formula", blockFormula, { alt: ["paragraph", "reference", "blockquote", "list"] });

const LONGEST_FORMULA = 5000; // characters
const MOST_TRIES = 1000; // places of a text where a formula may begin: each costs a search for its end

const mayTry = ({ env }) => (env.tries = (env.tries ?? 0) + 1) <= MOST_TRIES;

const PAIRS = [["$$", "$$", true], ["\\[", "\\]", true], ["\\(", "\\)", false], ["$", "$", false]];

function inlineFormula(state, silent) {
  const { src, pos, posMax } = state;
  const first = src.charCodeAt(pos);
  if (first !== 36 && first !== 92) return false; // $ and \
  const found = src.startsWith("\\boxed{", pos) ? boxed(src, pos, posMax) : delimited(state);
  if (!found) return false;
  if (!silent) Object.assign(state.push("formula", "", 0), { content: found.content, meta: { display: found.display } });
  state.pos = found.end;
  return true;
}

function delimited(state) {
  const { src, pos, posMax } = state;
  for (const [open, close, display] of PAIRS) {
    if (!src.startsWith(open, pos)) continue;
    if (!mayTry(state)) return null;
    const start = pos + open.length;
    const length = src.slice(start, Math.min(posMax, start + LONGEST_FORMULA + close.length)).indexOf(close);
    if (length <= 0) return null;
    const end = start + length;
    const content = src.slice(start, end);
    // "$5 and $6" are prices: a formula begins and ends without a space, and no digit follows it.
    if (open === "$" && (/^\s|\s$|\n\n/.test(content) || /\d/.test(src[end + 1] ?? ""))) return null;
    return { content, display, end: end + close.length };
  }
  return null;
}

function boxed(src, pos, posMax) {
  let depth = 0;
  for (let at = pos + 6; at < Math.min(posMax, pos + 2000); at++) {
    if (src[at] === "{") depth++;
    else if (src[at] === "}" && --depth === 0) return { content: src.slice(pos, at + 1), display: false, end: at + 1 };
  }
  return null;
}

function blockFormula(state, startLine, endLine, silent) {
  const first = state.src.slice(state.bMarks[startLine] + state.tShift[startLine], state.eMarks[startLine]);
  const pair = PAIRS.slice(0, 2).find(([open]) => first.startsWith(open));
  if (!pair || !mayTry(state)) return false;
  const [open, close] = pair;
  const lines = [];
  const most = state.bMarks[startLine] + LONGEST_FORMULA;
  for (let line = startLine; line < endLine && state.bMarks[line] < most; line++) {
    const text = line === startLine ? first.slice(open.length)
      : state.src.slice(state.bMarks[line], state.eMarks[line]);
    const end = text.indexOf(close);
    if (end < 0) {
      lines.push(text);
      continue;
    }
    if (text.slice(end + close.length).trim()) return false; // text follows: a formula within a line
    if (silent) return true;
    lines.push(text.slice(0, end));
    Object.assign(state.push("formula", "", 0), { content: lines.join("\n"), meta: { display: true }, block: true });
    state.line = line + 1;
    return true;
  }
  return false;
}

const TAGS = new Set("p strong em s ul ol li blockquote table thead tbody tr th td".split(" "));
const tagOf = (token) => (/^h[1-6]$/.test(token.tag) ? "div" : TAGS.has(token.tag) ? token.tag : "span");

/** Elements of a flat list of tokens, in which opening and closing ones nest. */
function elements(tokens) {
  const stack = [{ token: null, children: [] }];
  for (const token of tokens) {
    if (token.nesting === 1) stack.push({ token, children: [] });
    else if (token.nesting === -1) {
      const { token: opened, children } = stack.pop();
      stack.at(-1).children.push(wrapped(opened, children));
    } else stack.at(-1).children.push(single(token));
  }
  return stack[0].children;
}

function wrapped(token, children) {
  if (token.hidden) return children; // the paragraph of a tight list
  if (token.type === "link_open") return html`<${Link} to=${token.attrGet("href")}>${children}<//>`;
  if (token.type === "table_open") return html`<div class="wide"><table>${children}</table></div>`;
  const properties = /^h[1-6]$/.test(token.tag) ? { class: `heading ${token.tag}` } : {};
  if (token.attrGet("start") !== null) properties.start = token.attrGet("start");
  if (token.tag === "li" || token.tag === "p" || token.tag === "td") properties.dir = "auto";
  return h(tagOf(token), properties, children);
}

function single(token) {
  switch (token.type) {
    case "inline":
      return elements(token.children);
    case "text":
    case "text_special":
      return visible(token.content);
    case "code_inline":
      return html`<code dir="ltr">${visible(token.content)}</code>`;
    case "fence":
    case "code_block":
      return html`<${Code} text=${token.content.replace(/\n$/, "")} language=${token.info?.trim().split(/\s/)[0].toLowerCase()} />`;
    case "formula":
      return html`<${Formula} source=${token.content} display=${token.meta.display} />`;
    case "image":
      return html`<${Picture} source=${token.attrGet("src")} name=${token.content} />`;
    case "softbreak":
    case "hardbreak":
      return h("br");
    case "hr":
      return h("hr");
    default:
      return visible(token.content);
  }
}

// LaTeX as MathML, which browsers draw by themselves: no fonts, no style attributes. KaTeX gives a tree of it.
const FORMULAS = { output: "mathml", throwOnError: true, strict: "ignore", trust: false, maxExpand: 200, maxSize: 20 };
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
function Formula({ source, display = false }) {
  const plain = () => html`<code class="formula">${visible(source)}</code>`;
  if (source.length > LONGEST_FORMULA) return plain();
  return within(() => drawn(source, display) ?? plain(), plain);
}

function drawn(source, display) {
  try {
    const tree = katex.__renderToDomTree(source, { ...FORMULAS, displayMode: display });
    return html`<span class=${display ? "formula block" : "formula"}>${element(tree)}</span>`;
  } catch {
    return null; // no LaTeX that KaTeX knows
  }
}

const LIMIT = 40_000; // characters; a longer text is shown as it stands

/** A text that may be Markdown. */
export function Markdown({ text }) {
  if (text.length > LIMIT) return html`<div class="prose plain" dir="auto">${visible(text)}</div>`;
  let tokens;
  try {
    tokens = parser.parse(text, {});
  } catch {
    return html`<div class="prose plain" dir="auto">${visible(text)}</div>`;
  }
  return html`<div class="prose" dir="auto">${elements(tokens)}</div>`;
}
