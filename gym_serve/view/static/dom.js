// Preact with htm: components without a build step. No file of ours sets HTML from a string; the policy in
// index.html (Trusted Types) makes the browser refuse it.
import { Fragment, h, render } from "./vendor/preact.js";
import htm from "./vendor/htm.js";

export { Fragment, h, render };
export { useCallback, useEffect, useErrorBoundary, useLayoutEffect, useMemo, useRef, useState } from "./vendor/hooks.js";
export const html = htm.bind(h);

/** Class names of those that hold: classes("row", {chosen: true}) is "row chosen". */
export function classes(...names) {
  return names
    .flatMap((name) => (name && typeof name === "object" ? Object.keys(name).filter((key) => name[key]) : name || []))
    .join(" ");
}
