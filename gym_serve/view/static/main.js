// The viewer of files: which page is shown, and what all pages share.
import { changed, go, link, shared, useAddress } from "./address.js";
import { isStatic, takeToken, useRuns } from "./api.js";
import { ComparePage } from "./compare.js";
import { html, render } from "./dom.js";
import { Frame, Guarded } from "./frame.js";
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
  const page = PAGES[address.page] ?? PAGES.runs;
  const query = shared(address.query);
  const tabs = Object.entries(PAGES).filter(([, one]) => one.key);
  const keys = {
    ...Object.fromEntries(tabs.map(([name, one]) => [`g ${one.key}`, { does: `go to ${one.title}`, run: () => go(link(name, query)) }])),
    "/": { does: "filter", run: () => document.querySelector("#filter")?.focus() },
  };
  const at = [address.page, ...address.parts].join("/");
  return html`<${Frame} home=${link("runs", query)} at=${at} names=${[...address.parts.slice(0, 2), page.title]} keys=${keys}
    tabs=${tabs.map(([name, one]) => ({ title: one.title, to: link(name, query), current: name === address.page || name === page.under }))}
    status=${html`${state.runs && html`<${Indexing} runs=${state.runs} />`}${isStatic && html`<span class="muted exported">exported</span>`}`}>
      ${state.error ? html`<h1>Viewer</h1><${Problem} error=${state.error} />`
        : state.runs === null ? html`<p class="muted pad" role="status">Reading…</p>`
          : html`
            ${!["rollout", "attempts", "compare"].includes(address.page) &&
            state.runs.length > 1 && html`<${RunPicker} runs=${state.runs} chosen=${query.run}
              choose=${(run) => go(link([address.page, ...address.parts], changed(address.query, { run })))} />`}
            <${Guarded} key=${at}><${page.shows} address=${address} runs=${state.runs} version=${state.version} /><//>`}
    <//>`;
}

takeToken();
render(html`<${App} />`, document.querySelector("#page"));
