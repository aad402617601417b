// The frame of the page: its head, which page is shown, and what all pages share.
import { changed, go, link, shared, useAddress } from "./address.js";
import { isStatic, takeToken, useRuns } from "./api.js";
import { ComparePage } from "./compare.js";
import { html, render, useEffect, useErrorBoundary, useRef, useState } from "./dom.js";
import { Help, showHelp, useKeys } from "./keys.js";
import { LinkQuestion } from "./link.js";
import { AttemptsPage } from "./attempts.js";
import { Problem, RunPicker } from "./parts.js";
import { RolloutPage } from "./rollout.js";
import { RolloutsPage } from "./rollouts.js";
import { RunsPage } from "./runs.js";
import { TasksPage } from "./tasks.js";

const PAGES = {
  runs: { title: "Runs", shows: RunsPage, key: "r" },
  tasks: { title: "Tasks", shows: TasksPage, key: "t" },
  rollouts: { title: "Rollouts", shows: RolloutsPage, key: "o" },
  compare: { title: "Compare", shows: ComparePage, key: "c" },
  rollout: { title: "Rollout", shows: RolloutPage, under: "rollouts" },
  attempts: { title: "Two attempts", shows: AttemptsPage, under: "compare" },
};

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
function Guarded({ children }) {
  const [error] = useErrorBoundary((thrown) => console.error(thrown));
  return error ? html`<h1>Viewer</h1><${Problem} error=${{ message: `The page has failed: ${error.message}` }} />` : children;
}

function Indexing({ runs }) {
  const open = runs.filter((run) => run.indexed_bytes < run.bytes);
  if (open.length === 0) return null;
  const all = open.reduce((sum, run) => sum + run.bytes, 0);
  const done = open.reduce((sum, run) => sum + run.indexed_bytes, 0);
  const percent = Math.floor((done / all) * 100);
  return html`<span class="indexing" role="status"><progress max="100" value=${percent} aria-label="Reading the files"></progress>
    ${" "}reading ${percent} %</span>`;
}

function App() {
  const address = useAddress();
  const state = useRuns();
  const [theme, nextTheme] = useTheme();
  const main = useRef();
  const page = PAGES[address.page] ?? PAGES.runs;
  const query = shared(address.query);
  const open = (name) => go(link(name, query));
  const tabs = Object.entries(PAGES).filter(([, one]) => one.key);
  useKeys({
    ...Object.fromEntries(tabs.map(([name, one]) => [`g ${one.key}`, { does: `go to ${one.title}`, run: () => open(name) }])),
    "g g": { does: "go to the top", run: () => scrollTo({ top: 0 }) },
    "/": { does: "filter", run: () => document.querySelector("#filter")?.focus() },
    d: { does: "dark, light, or as the system", run: nextTheme },
  });
  const at = [address.page, ...address.parts].join("/");
  const first = useRef(true);
  useEffect(() => {
    document.title = [...address.parts.slice(0, 2), page.title, "gym_serve"].join(" · ");
    if (!first.current) {
      scrollTo({ top: 0 });
      main.current?.focus({ preventScroll: true }); // so that a screen reader begins with the new page
    }
    first.current = false;
  }, [at]);
  return html`
    <a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); main.current.focus(); }}>Skip to the page</a>
    <header class="top">
      <a class="brand" href=${link("runs", query)}><img src="static/icon.svg" alt="" width="22" height="22" /><span>gym_serve</span></a>
      <nav aria-label="Pages">${tabs.map(([name, one]) => html`<a href=${link(name, query)}
        aria-current=${name === address.page || name === page.under ? "page" : null}>${one.title}</a>`)}</nav>
      <div class="tools">
        ${state.runs && html`<${Indexing} runs=${state.runs} />`}
        ${isStatic && html`<span class="muted exported">exported</span>`}
        <button class="quiet" onClick=${nextTheme} aria-label="Colours: ${theme}" title="Colours: ${theme} (d)">${{ system: "◐", light: "☼", dark: "☾" }[theme]}</button>
        <button class="quiet" onClick=${showHelp} aria-label="Keys" title="Keys (?)">?</button>
      </div>
    </header>
    <main id="main" ref=${main} tabindex="-1">
      ${state.error ? html`<h1>Viewer</h1><${Problem} error=${state.error} />`
        : state.runs === null ? html`<p class="muted pad" role="status">Reading…</p>`
          : html`
            ${!["rollout", "attempts", "compare"].includes(address.page) &&
            state.runs.length > 1 && html`<${RunPicker} runs=${state.runs} chosen=${query.run}
              choose=${(run) => go(link([address.page, ...address.parts], changed(address.query, { run })))} />`}
            <${Guarded} key=${at}><${page.shows} address=${address} runs=${state.runs} version=${state.version} /><//>`}
    </main>
    <${LinkQuestion} /><${Help} />`;
}

takeToken();
render(html`<${App} />`, document.querySelector("#page"));
