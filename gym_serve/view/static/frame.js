// The frame that all pages stand in: the head, the colours, and what a page does that has just been opened.
import { html, useEffect, useErrorBoundary, useRef, useState } from "./dom.js";
import { Help, showHelp, useKeys } from "./keys.js";
import { LinkQuestion } from "./link.js";
import { Problem } from "./parts.js";
import { Name } from "./text.js";

const THEMES = ["system", "light", "dark"];

function useTheme() {
  const [theme, set] = useState(() => localStorage.getItem("gym-serve-theme") ?? "system");
  document.documentElement.dataset.theme = theme;
  return [theme, () => {
    const next = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    localStorage.setItem("gym-serve-theme", next);
    set(next);
  }];
}

/** A page that cannot draw itself says so, and the others stay. */
export function Guarded({ children }) {
  const [error] = useErrorBoundary((thrown) => console.error(thrown));
  return error ? html`<h1>Viewer</h1><${Problem} error=${{ message: `The page has failed: ${error.message}` }} />` : children;
}

/**
 * `tabs`: [{title, to, current}]; `at` says which page is shown, as `names` (of the window's title) do to people; `of`: a
 * name of what the pages are about.
 */
export function Frame({ home, tabs, at, names, of = null, status = null, keys, children }) {
  const [theme, nextTheme] = useTheme();
  const main = useRef();
  useKeys({ ...keys, "g g": { does: "go to the top", run: () => scrollTo({ top: 0 }) }, d: { does: "dark, light, or as the system", run: nextTheme } });
  const first = useRef(true);
  useEffect(() => {
    document.title = [...names, "gym_serve"].join(" · ");
    if (!first.current) {
      scrollTo({ top: 0 });
      main.current?.focus({ preventScroll: true }); // so that a screen reader begins with the new page
    }
    first.current = false;
  }, [at]);
  return html`
    <a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); main.current.focus(); }}>Skip to the page</a>
    <header class="top">
      <a class="brand" href=${home}><img src="static/icon.svg" alt="" width="22" height="22" /><span>gym_serve</span>${of && html` <strong class="of"><${Name} limit=${30}>${of}<//></strong>`}</a>
      <nav aria-label="Pages">${tabs.map(({ title, to, current }) => html`<a href=${to} aria-current=${current ? "page" : null}>${title}</a>`)}</nav>
      <div class="tools">
        ${status}
        <button class="quiet" onClick=${nextTheme} aria-label="Colours: ${theme}" title="Colours: ${theme} (d)">${{ system: "◐", light: "☼", dark: "☾" }[theme]}</button>
        <button class="quiet" onClick=${showHelp} aria-label="Keys" title="Keys (?)">?</button>
      </div>
    </header>
    <main id="main" ref=${main} tabindex="-1">${children}</main>
    <${LinkQuestion} /><${Help} />`;
}
