// The filter: a box for expressions, and lists of values to click.
import { changed, go, link } from "./address.js";
import { get, isStatic } from "./api.js";
import { html, useEffect, useRef, useState } from "./dom.js";
import { count } from "./format.js";
import { Name, visible } from "./text.js";

const quoted = (value) => `'${String(value).replaceAll("'", "''")}'`;

/** The condition that a rollout has a value. Tasks and versions are numbers where they look so. */
export const is = (key, value) => (key === "tool" || key === "tag" ? `${key}(${quoted(value)})`
  : `${key} = ${["task", "version", "last_version"].includes(key) && /^\d{1,17}$/.test(value) ? value : quoted(value)}`);

/** Both conditions. */
export const both = (one, other) => (!one ? other : / or /i.test(one) ? `(${one}) and ${other}` : `${one} and ${other}`);

/** The word at the cursor, which a suggestion replaces. */
function wordAt(text, cursor) {
  const start = text.slice(0, cursor).search(/[\w.]*$/);
  return { start, word: text.slice(start, cursor) };
}

export function FilterBox({ address, error }) {
  const where = address.query.get("where") ?? "";
  const [text, setText] = useState(where);
  const [options, setOptions] = useState([]);
  const [active, setActive] = useState(-1);
  const input = useRef();
  useEffect(() => setText(where), [where]);
  const apply = (value) => {
    setOptions([]);
    go(link([address.page, ...address.parts], changed(address.query, { where: value.trim(), at: null })));
  };
  const suggest = async (value, cursor) => {
    const { word } = wordAt(value, cursor);
    setActive(-1);
    if (word.length < 1 || isStatic) return setOptions([]);
    try {
      const { names } = await get("suggestions", { prefix: word });
      return setOptions(names.filter((name) => name !== word).slice(0, 8));
    } catch {
      return setOptions([]);
    }
  };
  const take = (name) => {
    const cursor = input.current.selectionStart;
    const { start } = wordAt(text, cursor);
    const next = `${text.slice(0, start)}${name} ${text.slice(cursor).trimStart()}`;
    setText(next);
    setOptions([]);
    input.current.focus();
    requestAnimationFrame(() => input.current.setSelectionRange(start + name.length + 1, start + name.length + 1));
  };
  const onKeyDown = (event) => {
    if (options.length && (event.key === "ArrowDown" || event.key === "ArrowUp")) {
      setActive((active + (event.key === "ArrowDown" ? 1 : options.length)) % (options.length + (active < 0 && event.key === "ArrowUp" ? 1 : 0) || 1));
      event.preventDefault();
    } else if ((event.key === "Enter" || event.key === "Tab") && active >= 0 && options[active]) {
      take(options[active]);
      event.preventDefault();
    } else if (event.key === "Enter") apply(text);
    else if (event.key === "Escape" && options.length) {
      setOptions([]);
      event.stopPropagation();
    }
  };
  const position = error?.position;
  return html`<form class="filter" role="search" onSubmit=${(event) => { event.preventDefault(); apply(text); }}>
    <label for="filter" class="hidden">Filter</label>
    <input id="filter" ref=${input} type="search" autocomplete="off" spellcheck=${false} dir="ltr" role="combobox"
      placeholder="reward < 1 and tool('get_weather') and words('rain*')" value=${text}
      aria-expanded=${options.length > 0 ? "true" : "false"} aria-controls="suggestions" aria-autocomplete="list"
      aria-activedescendant=${active >= 0 ? `suggestion-${active}` : null} aria-invalid=${error ? "true" : null} aria-describedby=${error ? "filter-error" : null}
      onInput=${(event) => { setText(event.target.value); suggest(event.target.value, event.target.selectionStart); }}
      onKeyDown=${onKeyDown} onBlur=${() => setTimeout(() => setOptions([]), 150)} />
    <button type="submit">Filter</button>
    ${where && html`<button type="button" class="quiet" onClick=${() => apply("")}>Clear</button>`}
    <ul id="suggestions" role="listbox" aria-label="Names" hidden=${options.length === 0}>${options.map((name, index) => html`
      <li id="suggestion-${index}" role="option" aria-selected=${index === active ? "true" : "false"} onMouseDown=${(event) => { event.preventDefault(); take(name); }}>${visible(name)}</li>`)}</ul>
    ${error && position !== undefined && html`<p id="filter-error" class="error" role="alert">${visible(error.message)}
      ${position !== null && html`<code class="where" dir="ltr">${visible(where.slice(Math.max(0, position - 30), position))}<mark>${visible(where.slice(position, position + 12)) || "⟨end⟩"}</mark></code>`}</p>`}
  </form>`;
}

const FACETS = [["agent", "Agent"], ["environment", "Environment"], ["failure", "Failure"], ["tool", "Tool used"], ["version", "Policy version"], ["last_version", "Last policy version"], ["tag", "Tag"]];

/** The values that there are, with how often; a click adds one to the filter, or takes it out. */
export function Facets({ facets, where, choose }) {
  const straddled = Object.entries(facets?.version ?? {}).some(([value, number]) => facets.last_version?.[value] !== number);
  const shown = FACETS.filter(([key]) => key !== "last_version" || straddled).map(([key, title]) => [key, title, Object.entries(facets?.[key] ?? {}).sort((a, b) => b[1] - a[1])])
    .filter(([, , entries]) => entries.length > 0);
  return shown.map(([key, title, entries]) => html`<section class="facet"><h2>${title}</h2><ul>${entries.slice(0, 12).map(([value, number]) => {
    const condition = is(key, value);
    const on = (where ?? "").split(/ and /).includes(condition);
    const rest = (where ?? "").split(/ and /).filter((one) => one !== condition).join(" and ");
    return html`<li><button class=${on ? "on" : ""} aria-pressed=${on ? "true" : "false"} onClick=${() => choose(on ? rest : both(where, condition))}>
      <${Name} limit=${30}>${value === "" ? "(none)" : value}<//><span class="value">${count(number)}</span></button></li>`;
  })}</ul></section>`);
}
