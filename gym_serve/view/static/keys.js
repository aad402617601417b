// Keys. A page says what its keys do while it is shown; "?" lists them.
import { html, useEffect, useRef, useState } from "./dom.js";

const shown = []; // {key: {does, run}} of what is on the screen, the newest last
let pending = null; // the time of a "g" that waits for its second letter
let openHelp = () => {};

const isTyping = (element) => element?.closest?.("input, textarea, select, [contenteditable]") !== null;

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
  if (isTyping(event.target)) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (document.querySelector("dialog[open]")) return;
  let key = event.key;
  if (pending !== null && performance.now() - pending < 1500) key = `g ${key}`;
  else if (key === "g") {
    pending = performance.now();
    event.preventDefault();
    return;
  }
  pending = null;
  if (key === "?") openHelp();
  else {
    const keys = shown.findLast((one) => one[key]);
    if (!keys) return;
    keys[key].run(event);
  }
  event.preventDefault();
});

/** While the caller is shown: {"j": {does: "next row", run()}}; "g r" is the letter g, then r. */
export function useKeys(keys) {
  const current = useRef(keys);
  current.current = keys;
  useEffect(() => {
    const entry = new Proxy({}, {
      get: (_, key) => current.current[key],
      ownKeys: () => Object.keys(current.current),
      getOwnPropertyDescriptor: (_, key) => ({ value: current.current[key], enumerable: true, configurable: true }),
    });
    shown.push(entry);
    return () => shown.splice(shown.indexOf(entry), 1);
  }, []);
}

/** The dialog that lists the keys; one of it is in the page. */
export function Help() {
  const dialog = useRef();
  const [keys, set] = useState({});
  openHelp = () => {
    set(Object.assign({}, ...shown.map((one) => ({ ...one }))));
    dialog.current.showModal();
  };
  const all = { ...keys, "?": { does: "this list" }, Esc: { does: "leave a field or a dialog" } };
  return html`<dialog ref=${dialog} aria-labelledby="help-title" class="help">
    <h2 id="help-title">Keys</h2>
    <table class="pairs"><tbody>${Object.entries(all).map(([key, { does }]) => html`
      <tr><th scope="row">${key.split(" ").map((one) => html`<kbd>${one}</kbd> `)}</th><td>${does}</td></tr>`)}</tbody></table>
    <p class="buttons"><button onClick=${() => dialog.current.close()}>Close</button></p>
  </dialog>`;
}

export const showHelp = () => openHelp();
