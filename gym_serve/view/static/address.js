// What the page shows stands in the URL's fragment: #/rollouts?run=1f&where=reward>0&sort=-reward.
// So every view can be linked, and the server never sees it.
import { useEffect, useState } from "./dom.js";

/** The fragment as {page, parts, query}: "#/rollout/1f/3?view=raw" has the page "rollout" and the parts ["1f", "3"]. */
export function read(hash = location.hash) {
  const [path, query = ""] = splitOnce(hash.replace(/^#\/?/, ""), "?");
  const [page, ...parts] = path.split("/").map(decode);
  return { page: page || "runs", parts, query: new URLSearchParams(query) };
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // a % that escapes nothing
  }
}

function splitOnce(text, mark) {
  const at = text.indexOf(mark);
  return at < 0 ? [text] : [text.slice(0, at), text.slice(at + 1)];
}

/** A link to a page. `query` is an object (a list gives a key several times) or URLSearchParams; empty values are left out. */
export function link(parts, query = {}) {
  const search = query instanceof URLSearchParams ? query : search_of(query);
  const text = search.toString();
  return "#/" + [parts].flat().map((part) => encodeURIComponent(part)).join("/") + (text ? "?" + text : "");
}

function search_of(query) {
  const search = new URLSearchParams();
  for (const [key, value] of Object.entries(query))
    for (const one of [value].flat()) if (one !== null && one !== undefined && one !== "") search.append(key, one);
  return search;
}

/** The query with some keys changed; the others stay. */
export function changed(query, changes) {
  const next = new URLSearchParams(query);
  for (const [key, value] of Object.entries(changes)) {
    next.delete(key);
    for (const one of [value].flat()) if (one !== null && one !== undefined && one !== "") next.append(key, one);
  }
  return next;
}

/** The part of a query that all pages share: the runs and the filter. */
export function shared(query) {
  return { run: query.getAll("run"), where: query.get("where") };
}

export function go(hash, { replace = false } = {}) {
  if (hash === location.hash) return;
  if (replace) {
    history.replaceState(null, "", hash);
    dispatchEvent(new HashChangeEvent("hashchange"));
  } else location.hash = hash;
}

export function useAddress() {
  const [hash, set] = useState(location.hash);
  useEffect(() => {
    const changed = () => set(location.hash);
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return read(hash);
}
