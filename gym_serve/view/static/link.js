// Links of rollouts. A model wrote them: a click shows where one leads, and only a second click goes there.
import { html, useEffect, useRef, useState } from "./dom.js";
import { visible } from "./text.js";

let ask = () => {};

export function Link({ to, children }) {
  return html`<button type="button" class="link" onClick=${() => ask(to ?? "")}>${children}</button>`;
}

function target(address) {
  try {
    const url = new URL(address);
    return ["http:", "https:"].includes(url.protocol) ? url : null;
  } catch {
    return null;
  }
}

/** The question; one of it is in the page. */
export function LinkQuestion() {
  const [address, set] = useState(null);
  const dialog = useRef();
  ask = set;
  useEffect(() => {
    if (address !== null) dialog.current.showModal();
  }, [address]);
  const url = address === null ? null : target(address);
  return html`<dialog ref=${dialog} aria-labelledby="link-title" onClose=${() => set(null)}>
    ${address !== null && html`
      <h2 id="link-title">${url ? "Leave the viewer?" : "This link cannot be opened"}</h2>
      <p>${url ? html`A rollout contains this link to <strong><bdi dir="ltr">${url.host}</bdi></strong>.`
        : "Only links to http and https addresses can be opened from here."}</p>
      <pre class="plain address" dir="ltr">${visible((url?.href ?? address).slice(0, 2000))}</pre>
      <p class="buttons">
        <button onClick=${() => dialog.current.close()}>Stay</button>
        ${url && html`<a class="button" href=${url.href} target="_blank" rel="noopener noreferrer"
          onClick=${() => dialog.current.close()}>Open in a new tab</a>`}
      </p>`}
  </dialog>`;
}
