// A table of any length: only the rows on the screen are elements, and only their pages are fetched.
import { html, useEffect, useLayoutEffect, useRef, useState } from "./dom.js";
import { count } from "./format.js";
import { useKeys } from "./keys.js";
import { Problem } from "./parts.js";

const PAGE = 100; // rows of a request
const KEPT = 60; // pages
const TALLEST = 12_000_000; // pixels; browsers cut taller elements
const positions = new Map(); // of tables that were left, by their name

function useNarrow() {
  const query = matchMedia("(max-width: 700px)");
  const [narrow, set] = useState(query.matches);
  useEffect(() => {
    const changed = () => set(query.matches);
    query.addEventListener("change", changed);
    return () => query.removeEventListener("change", changed);
  }, []);
  return narrow;
}

/** Pages of rows, fetched when they come into sight. */
function usePages(fetchRows, name, version) {
  const [, again] = useState(0);
  const store = useRef({ name: null });
  if (store.current.name !== name) {
    store.current.controller?.abort();
    store.current = { name, version, pages: new Map(), asked: new Set(), total: null, error: null, controller: new AbortController() };
  } else if (store.current.version !== version) {
    store.current.version = version; // the file has grown: rows stay until their new ones have come
    store.current.asked.clear();
  }
  const current = store.current;
  const need = (first, last) => {
    for (let page = Math.floor(first / PAGE); page <= Math.floor(last / PAGE); page++) {
      if (current.asked.has(page)) continue;
      current.asked.add(page);
      fetchRows(page * PAGE, PAGE, current.controller.signal).then(
        (answer) => {
          current.total = answer.total;
          current.answer = answer;
          current.error = null;
          current.pages.delete(page);
          current.pages.set(page, answer.rows);
          for (const old of current.pages.keys()) {
            if (current.pages.size <= KEPT) break;
            current.pages.delete(old);
            current.asked.delete(old);
          }
          if (store.current === current) again((n) => n + 1);
        },
        (error) => {
          if (error.name === "AbortError" || store.current !== current) return;
          current.error = error;
          again((n) => n + 1);
        },
      );
    }
  };
  useEffect(() => () => store.current.controller?.abort(), []);
  return { ...current, need, row: (index) => current.pages.get(Math.floor(index / PAGE))?.[index % PAGE] };
}

/**
 * `columns(answer)`: [{key, name, width, number, sort, cell(row, index)}]; the first one holds the row's link.
 * `fetchRows(offset, limit, signal)` gives {total, rows}. `name` says which rows they are: another name starts anew.
 */
export function Table({ label, name, version, columns, fetchRows, sort, setSort, onAnswer, empty, narrowCell = null, rowHeight = 36, narrowHeight = 76 }) {
  const narrow = useNarrow();
  const height = narrow && narrowCell ? narrowHeight : rowHeight;
  const pages = usePages(fetchRows, name, version);
  const scroller = useRef();
  const [view, setView] = useState({ top: positions.get(name)?.top ?? 0, size: 800 });
  const [chosen, setChosen] = useState(positions.get(name)?.chosen ?? -1);
  const focusNext = useRef(null); // the row that a key has chosen
  const focusing = useRef(false); // by a key: the row is already the chosen one
  const at = useRef(chosen); // as `chosen`, for keys that come faster than the page is drawn
  at.current = chosen;
  const total = pages.total ?? 0;
  const tall = Math.min(total * height, TALLEST);
  const stretch = total * height > TALLEST ? (total * height - view.size) / (tall - view.size) : 1;
  const offset = view.top * stretch; // in rows' pixels; the scroll bar of a huge table is compressed
  const first = Math.max(0, Math.floor(offset / height) - 4);
  const last = Math.min(total - 1, Math.ceil((offset + view.size) / height) + 4);
  useEffect(() => {
    if (pages.total === null) pages.need(first, first);
    else if (total > 0) {
      const timer = setTimeout(() => pages.need(first, last), pages.row(first) && pages.row(last) ? 0 : 60); // not while it flies past
      return () => clearTimeout(timer);
    }
    return undefined;
  });
  useEffect(() => onAnswer?.(pages.answer ?? null), [pages.answer]);
  useLayoutEffect(() => {
    const element = scroller.current;
    if (!element) return undefined;
    const measure = () => setView((before) => (before.size === element.clientHeight ? before : { ...before, size: element.clientHeight }));
    measure();
    const sizes = new ResizeObserver(measure);
    sizes.observe(element);
    return () => sizes.disconnect();
  }, [pages.total === null]);
  const named = useRef(name);
  useLayoutEffect(() => {
    const place = positions.get(name) ?? { top: 0, chosen: -1 };
    if (named.current !== name) setChosen(place.chosen);
    named.current = name;
    if (scroller.current) scroller.current.scrollTop = place.top;
  }, [name, pages.total === null]);
  useEffect(() => {
    positions.set(name, { top: view.top, chosen });
    if (positions.size > 50) positions.delete(positions.keys().next().value);
  });
  useEffect(() => {
    if (focusNext.current !== chosen) return;
    const link = scroller.current.querySelector(`[aria-rowindex="${chosen + 2}"] a`);
    if (link) {
      focusNext.current = null;
      focusing.current = true;
      link.focus({ preventScroll: true });
      focusing.current = false;
    }
  });
  const move = (to) => {
    const index = Math.max(0, Math.min(total - 1, to));
    at.current = index;
    setChosen(index);
    focusNext.current = index;
    const element = scroller.current;
    const top = index * height;
    const room = element.clientHeight - 44;
    if (top < offset) element.scrollTop = top / stretch;
    else if (top + height > offset + room) element.scrollTop = (top + height - room) / stretch;
  };
  useKeys({
    j: { does: "next row", run: () => move(at.current + 1) },
    k: { does: "row before", run: () => move(at.current - 1) },
    G: { does: "last row", run: () => move(total - 1) },
    "g g": { does: "first row", run: () => move(0) },
  });
  if (pages.error && pages.error.position === undefined) return html`<${Problem} error=${pages.error} />`;
  if (pages.error) return null; // the filter says what is wrong with it
  if (pages.total === null) return html`<p class="muted pad" role="status">Reading…</p>`;
  if (total === 0) return empty;
  const all = columns(pages.answer ?? {});
  const shown = narrow && narrowCell ? [] : all;
  const template = shown.map(({ width }) => width).join(" ");
  const wide = shown.reduce((sum, column) => sum + (column.least ?? (parseInt(column.width) || 200)), 0) + 32;
  const rows = [];
  for (let index = first; index <= last; index++) {
    const row = pages.row(index);
    const style = { height: `${height}px`, top: `${index * height - offset + view.top}px`, gridTemplateColumns: template };
    rows.push(html`<div role="row" key=${index} class="row ${index % 2 ? "odd" : ""} ${index === chosen ? "chosen" : ""}" style=${style}
      aria-rowindex=${index + 2} onFocusIn=${() => focusing.current || setChosen(index)}>
      ${!row ? html`<div role="cell" class="waiting">…</div>`
        : narrow && narrowCell ? html`<div role="cell" class="narrow">${narrowCell(row, index)}</div>`
          : shown.map((column) => html`<div role="cell" key=${column.key} class=${column.number ? "cell number" : "cell"}>${column.cell(row, index)}</div>`)}
    </div>`);
  }
  const [sorted, down] = [sort?.replace(/^-/, ""), sort?.startsWith("-")];
  return html`<div class="scroller" ref=${scroller} tabindex="0" role="region" aria-label=${label}
      onScroll=${(event) => setView((before) => ({ ...before, top: event.target.scrollTop }))}>
    <div role="table" aria-label="${label}, ${count(total)}" aria-rowcount=${total + 1} class="table" style=${{ minWidth: shown.length ? `${wide}px` : "0" }}>
      <div role="rowgroup" class="head ${shown.length ? "" : "hidden"}"><div role="row" aria-rowindex="1" class="row" style=${{ gridTemplateColumns: template }}>
        ${(shown.length ? shown : all.slice(0, 1)).map((column) => html`<div role="columnheader" key=${column.key} class=${column.number ? "cell number" : "cell"}
            aria-sort=${column.sort ? (sorted === column.sort ? (down ? "descending" : "ascending") : "none") : null}>
          ${column.sort && shown.length ? html`<button title="Sort by ${column.title ?? column.name}" onClick=${() => setSort(sorted === column.sort && down ? column.sort : sorted === column.sort ? "" : `-${column.sort}`)}>
            ${column.name}<span aria-hidden="true">${sorted === column.sort ? (down ? " ↓" : " ↑") : ""}</span></button>` : column.name}</div>`)}
      </div></div>
      <div role="rowgroup" class="body" style=${{ height: `${tall}px` }}>${rows}</div>
    </div></div>`;
}
