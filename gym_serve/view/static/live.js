// The page of a running graph: the episodes that run, one of them, and the load of the servers.
import { link, useAddress } from "./address.js";
import { html, render } from "./dom.js";
import { EpisodePage } from "./live_episode.js";
import { EpisodesPage } from "./live_episodes.js";
import { Frame, Guarded } from "./frame.js";

const HOME = link("episodes");

function App() {
  const address = useAddress();
  const isOne = address.page === "episode";
  const at = [address.page, ...address.parts].join("/");
  const graph = decodeURIComponent(location.pathname.split("/").at(-3)); // /GRAPH/ui/; empty at the root
  return html`<${Frame} home=${HOME} at=${at} of=${graph} names=${[isOne ? address.parts[0] : "Episodes", graph].filter(Boolean)}
    tabs=${[{ title: "Episodes", to: HOME, current: true }, { title: "API", to: "../docs" }]}
    keys=${{ "g e": { does: "go to the episodes", run: () => { location.hash = HOME; } } }}>
      <${Guarded} key=${at}>${isOne ? html`<${EpisodePage} id=${address.parts[0]} />` : html`<${EpisodesPage} />`}<//>
    <//>`;
}

render(html`<${App} />`, document.querySelector("#page"));
