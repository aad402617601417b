// Preact with htm: components without a build step. No file of ours sets HTML from a string; the policy in
// index.html (Trusted Types) makes the browser refuse it.
import { h, render } from "./vendor/preact.js";
import htm from "./vendor/htm.js";

export { h, render };
export { useCallback, useEffect, useErrorBoundary, useLayoutEffect, useMemo, useRef, useState } from "./vendor/hooks.js";
export const html = htm.bind(h);
