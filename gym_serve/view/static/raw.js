// The rollout's line as it is in the file.
import { getText } from "./api.js";
import { html, useEffect, useState } from "./dom.js";
import { bytes } from "./format.js";
import { Problem } from "./parts.js";
import { Plain } from "./text.js";
import { asText, Value } from "./values.js";

const PARSED = 2_000_000; // characters; a longer line is shown as its text

export function Raw({ data, run, n }) {
  const [state, set] = useState({ text: null, error: null });
  const [asTree, setTree] = useState(true);
  useEffect(() => {
    const controller = new AbortController();
    getText(`rollout/${run}/${n}/raw`, controller.signal).then((text) => set({ text, error: null }), (error) => error.name === "AbortError" || set({ text: null, error }));
    return () => controller.abort();
  }, [run, n]);
  const { text, error } = state;
  if (error) return html`<${Problem} error=${error} />`;
  if (text === null) return html`<p class="muted pad" role="status">Reading…</p>`;
  let value;
  try {
    if (text.length <= PARSED) value = JSON.parse(text);
  } catch {
    // shown as its text
  }
  return html`<div class="toolbar"><button class="quiet" aria-pressed=${asTree ? "true" : "false"} onClick=${() => setTree(true)} disabled=${value === undefined}>Tree</button>
      <button class="quiet" aria-pressed=${asTree ? "false" : "true"} onClick=${() => setTree(false)}>Text</button>
      <button class="quiet" onClick=${() => navigator.clipboard.writeText(text)}>Copy</button><span class="muted">${bytes(text.length)}</span></div>
    ${asTree && value !== undefined ? html`<div class="raw"><${Value} value=${value} /></div>`
      : html`<${Plain} text=${value === undefined ? text : asText(value, 2)} of="line" lines=${200} characters=${20000} code />`}`;
}
