// Charts: lines by uPlot, bars as elements. Each has a text for those who do not see it.
import { html, useEffect, useRef } from "./dom.js";
import { number } from "./format.js";
import UPlot from "./vendor/uplot.js";

/** The colour that a CSS colour (such as "var(--text)") has now, for a canvas. */
function resolved(colour, element) {
  const probe = document.createElement("span");
  probe.style.color = colour;
  element.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}

/** Lines over a common x. `lines`: [{name, colour, points: [[x, y]]}]; y may be null. */
export function Lines({ lines, label, x, y, range = null, height = 220, whole = false }) {
  const frame = useRef();
  const key = JSON.stringify(lines);
  useEffect(() => {
    const element = frame.current;
    let chart;
    const draw = () => {
      chart?.destroy();
      const text = resolved("var(--muted)", element);
      const grid = { stroke: resolved("var(--line)", element), width: 1 };
      const axis = { stroke: text, grid, ticks: grid, font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif", labelSize: 18 };
      const xs = [...new Set(lines.flatMap(({ points }) => points.map(([at]) => at)))].sort((a, b) => a - b);
      const data = [xs, ...lines.map(({ points }) => {
        const values = new Map(points);
        return xs.map((at) => (values.has(at) ? values.get(at) : undefined));
      })];
      chart = new UPlot({
        width: Math.max(200, element.clientWidth), height,
        legend: { show: false },
        cursor: { drag: { x: false, y: false } },
        scales: { x: { time: false }, ...(range && { y: { range } }) },
        axes: [
          { ...axis, label: x, size: 34, space: 60, ...(whole && { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000] }) },
          { ...axis, label: y, size: 46, values: (_, ticks) => ticks.map((tick) => number(tick, 3)) },
        ],
        series: [{}, ...lines.map((line) => ({
          label: line.name, stroke: resolved(line.colour, element), width: 2, spanGaps: true,
          points: { show: line.points.length < 30, size: 5 },
        }))],
      }, data, element);
    };
    draw();
    const sizes = new ResizeObserver(() => chart.setSize({ width: Math.max(200, element.clientWidth), height }));
    sizes.observe(element);
    const themes = new MutationObserver(draw);
    themes.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
    const system = matchMedia("(prefers-color-scheme: dark)");
    system.addEventListener("change", draw);
    return () => {
      sizes.disconnect();
      themes.disconnect();
      system.removeEventListener("change", draw);
      chart.destroy();
    };
  }, [key]);
  return html`<div class="chart" role="img" aria-label=${label} ref=${frame}></div>`;
}

/** A histogram. With `choose(low, high, isLast)`, a bar is a button. */
export function Histogram({ histogram, label, colour = "var(--accent)", choose = null }) {
  const { edges, counts } = histogram;
  const most = Math.max(1, ...counts);
  const text = (index) => `${number(edges[index], 2)} to ${number(edges[index + 1], 2)}: ${counts[index]}`;
  const bars = counts.map((value, index) => {
    const fill = html`<span style=${{ height: `${value === 0 ? 0 : Math.max(3, (value / most) * 100)}%`, background: colour }}></span>`;
    return choose
      ? html`<button title=${text(index)} aria-label="Rewards ${text(index)}" onClick=${() => choose(edges[index], edges[index + 1], index === counts.length - 1)}>${fill}</button>`
      : html`<span class="column" title=${text(index)}>${fill}</span>`;
  });
  return html`<div class="histogram" role=${choose ? "group" : "img"} aria-label="${label}: ${counts.map((_, index) => text(index)).join("; ")}">
    <div class="columns">${bars}</div>
    <div class="edges muted" aria-hidden="true"><span>${number(edges[0], 2)}</span><span>${number(edges.at(-1), 2)}</span></div></div>`;
}
