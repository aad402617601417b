// Reads the server's JSON (or, in a static export, its files), and keeps the token of the URL.
import { useEffect, useRef, useState } from "./dom.js";

const KEY = "gym-serve-token";
const place = document.querySelector("meta[name=gym-serve]")?.content;
export const isStatic = place === "static";
export const isLive = place === "live"; // the page of a running graph

/** Take the token out of "#token=...", so that it is in no link that is copied from the address bar. */
export function takeToken() {
  const match = /^#token=([^&/]*)[&]?(.*)$/.exec(location.hash);
  if (!match) return;
  sessionStorage.setItem(KEY, decodeURIComponent(match[1]));
  history.replaceState(null, "", "#" + match[2]);
}

function headers(more = {}) {
  const token = sessionStorage.getItem(KEY);
  return token ? { Authorization: `Bearer ${token}`, ...more } : more;
}

export class ApiError extends Error {
  constructor(status, { message, position } = {}) {
    super(message || `The server answered ${status}.`);
    this.status = status;
    this.position = position;
  }
}

/** Where the server answers: "../episodes" is a route of the graph, any other one is the page's own. */
export function url(path, params = {}) {
  const search = new URLSearchParams();
  for (const [key, value] of Object.entries(params))
    for (const one of [value].flat()) if (one !== null && one !== undefined && one !== "") search.append(key, one);
  const text = search.toString();
  return `${path.startsWith("../") ? "" : "api/"}${path}${text ? "?" + text : ""}`;
}

async function answer(path, params, options) {
  if (isStatic) return (await import("./exported.js")).answer(path, params);
  let response;
  try {
    response = await fetch(url(path, params), { ...options, headers: headers(options.headers) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, { message: isLive ? "The graph does not answer. Is it still running?" : "The server does not answer. Is gym-serve view still running?" });
  }
  if (response.ok) return response;
  if (response.status === 401)
    throw new ApiError(401, { message: isLive ? "Your sign-in is over: load the page again." : "The server wants its token: open the link that gym-serve view has printed." });
  const body = await response.json().catch(() => ({}));
  throw new ApiError(response.status, typeof body.error === "object" ? body.error : { message: body.error });
}

export async function get(path, params = {}, signal = undefined) {
  return (await answer(path, params, { signal })).json();
}

export async function getText(path, signal = undefined) {
  return (await answer(path, {}, { signal })).text();
}

export async function send(method, path, body) {
  const options = { method, headers: { "Content-Type": "application/json", "X-Gym-Serve": "1" } };
  return (await answer(path, {}, { ...options, body: JSON.stringify(body) })).json();
}

/** What the server answers, again whenever path, params or `version` change. The former answer stays until then. */
export function useAnswer(path, params = {}, version = 0) {
  const [state, set] = useState({ data: null, error: null, loading: true, of: null });
  const of = path === null ? null : url(path, params);
  useEffect(() => {
    if (of === null) return undefined;
    const controller = new AbortController();
    set((before) => ({ ...before, loading: true }));
    get(path, params, controller.signal).then(
      (data) => set({ data, error: null, loading: false, of }),
      (error) => error.name === "AbortError" || set({ data: null, error, loading: false, of }),
    );
    return () => controller.abort();
  }, [of, version]);
  return { ...state, stale: state.of !== of };
}

/** The runs, asked again while files grow. `version` grows with what is indexed. */
export function useRuns() {
  const [state, set] = useState({ runs: null, error: null });
  const timer = useRef();
  useEffect(() => {
    let ended = false;
    const ask = async () => {
      let next;
      try {
        const { runs } = await get("runs");
        next = { runs, error: null };
      } catch (error) {
        next = { runs: null, error };
      }
      if (ended) return;
      set((before) => (JSON.stringify(before) === JSON.stringify(next) && !next.error ? before : next));
      const busy = next.runs?.some((run) => !run.done);
      if (!isStatic) timer.current = setTimeout(ask, document.hidden ? 30000 : busy ? 1500 : 5000);
    };
    ask();
    return () => {
      ended = true;
      clearTimeout(timer.current);
    };
  }, []);
  const version = (state.runs ?? []).reduce((sum, run) => sum + run.rollouts + (run.done ? 1 : 0), 0);
  return { ...state, version };
}

/**
 * What `ask(signal, before)` gives, again and again while the page is in sight. An error leaves the former data in place.
 * The next question waits for the answer, and as long again, so that a slow graph is asked less often.
 */
export function usePoll(ask, name, seconds = 1) {
  const [state, set] = useState({ data: null, error: null, of: name });
  useEffect(() => {
    const controller = new AbortController();
    let [timer, data] = [null, null];
    const again = async () => {
      if (document.hidden) return; // `onVisible` goes on
      const begun = performance.now();
      let error = null;
      try {
        data = await ask(controller.signal, data);
      } catch (thrown) {
        error = thrown;
      }
      if (controller.signal.aborted) return;
      set({ data, error, of: name });
      if (data?.final || error?.status === 404) return;
      timer = setTimeout(again, error ? 3000 : Math.max(seconds * 1000, performance.now() - begun));
    };
    const onVisible = () => {
      clearTimeout(timer);
      again();
    };
    document.addEventListener("visibilitychange", onVisible);
    again();
    return () => {
      controller.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", onVisible);
    };
  }, [name]);
  return state.of === name ? state : { data: null, error: null, of: name };
}
