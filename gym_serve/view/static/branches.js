// A rollout whose history was rewritten is a tree: each branch goes on from a part of its parent.
import { html, useState } from "./dom.js";
import { times } from "./format.js";
import { Conversation } from "./conversation.js";
import { Name } from "./text.js";

export function Branches({ data, run, n }) {
  const [chosen, choose] = useState(data.branches[0].id);
  const children = (parent) => data.branches.filter((one) => (one.parent ?? null) === parent);
  const known = new Set(data.branches.map(({ id }) => id));
  const roots = data.branches.filter((one) => !known.has(one.parent));
  const node = (branch, depth) => html`<li><button class=${branch.id === chosen ? "on" : "quiet"} aria-pressed=${branch.id === chosen ? "true" : "false"} onClick=${() => choose(branch.id)}>
      ${branch.id === 0 ? "What was scored" : html`Branch <${Name} limit=${40}>${String(branch.id)}<//>`} <span class="muted">${times(branch.items.length, "item")}</span></button>
    ${depth < 30 && children(branch.id).length > 0 && html`<ul>${children(branch.id).map((one) => node(one, depth + 1))}</ul>`}</li>`;
  const branch = data.branches.find(({ id }) => id === chosen);
  const all = new Map(data.items.map((item, index) => [item.index ?? index, item]));
  const items = branch.items.map((index) => all.get(index)).filter(Boolean);
  return html`<ul class="tree">${roots.map((one) => node(one, 0))}</ul>
    <${Conversation} key=${chosen} data=${{ ...data, items, omitted: 0 }} run=${run} n=${n} />`;
}
