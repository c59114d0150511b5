// Small pictures as inline SVG: sparklines, bars, the timeline of a request, a map of shares. Each has its figures as text too.

import { h } from "./dom.js";
import { UNKNOWN, duration } from "./text.js";

/** A line over time, its area shaded; gaps where values are null. `label` describes it for who cannot see it. */
export function sparkline(values, { label, width = 160, height = 32, tone = "accent" } = {}) {
  const known = (values ?? []).filter((value) => value !== null && Number.isFinite(value));
  if (known.length < 2)
    return h("div", { class: "spark none" }, known.length === 0 ? "no history yet" : "one figure so far");
  const top = Math.max(...known) || 1;
  const step = width / Math.max(1, values.length - 1);
  const runs = [];
  let run = null;
  values.forEach((value, at) => {
    if (value === null || !Number.isFinite(value)) {
      run = null;
      return;
    }
    if (run === null) runs.push((run = []));
    run.push([at * step, height - 2 - (value / top) * (height - 4)]);
  });
  const point = ([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`;
  const shapes = runs.flatMap((points) => [
    h("path", {
      class: "area",
      d: `M${point([points[0][0], height])} L${points.map(point).join(" ")} L${point([points.at(-1)[0], height])} Z`,
    }),
    // A figure between two gaps is a dash: a line of one point would not be seen.
    h("polyline", {
      class: "curve",
      points: (points.length > 1 ? points : [points[0], [points[0][0] + 2, points[0][1]]]).map(point).join(" "),
    }),
  ]);
  return h(
    "svg",
    {
      class: `spark ${tone}`,
      viewBox: `0 0 ${width} ${height}`,
      preserveAspectRatio: "none",
      role: "img",
      "aria-label": label,
    },
    shapes,
  );
}

/** A share of one as a bar, with the text beside it. */
export function bar(part, text, { tone = null } = {}) {
  const filled = typeof part === "number" ? Math.min(1, Math.max(0, part)) : 0;
  const shade = tone ?? (filled >= 0.95 ? "bad" : filled >= 0.8 ? "warn" : "accent");
  return h(
    "span",
    { class: "bar" },
    h(
      "span",
      { class: "track", "aria-hidden": "true" },
      h("span", { class: `fill ${shade}`, css: { width: `${(filled * 100).toFixed(1)}%` } }),
    ),
    h("span", { class: "figure" }, part === null || part === undefined ? UNKNOWN : text),
  );
}

/** Phases side by side, as wide as they lasted; each named with its duration below. `phases`: [name, begin ms, end ms or null]. */
export function timeline(phases, nowMs) {
  if (phases.length === 0) return h("p", { class: "quiet" }, "No phases are known.");
  const parts = phases.map(([name, begin, end]) => ({
    name,
    begin,
    seconds: Math.max(0, ((end ?? nowMs) - begin) / 1000),
    lasts: end === null,
  }));
  const whole = parts.reduce((sum, part) => sum + part.seconds, 0) || 1;
  const slot = (part) => `phase phase-${part.name.replaceAll(/[^a-z]/g, "-")}${part.lasts ? " lasts" : ""}`;
  return h(
    "div",
    { class: "timeline" },
    h(
      "div",
      {
        class: "strip",
        role: "img",
        "aria-label": parts.map((part) => `${part.name} ${duration(part.seconds)}`).join(", "),
      },
      parts.map((part, at) =>
        h(
          "div",
          {
            key: `${at}`,
            class: slot(part),
            css: { "flex-grow": String(Math.max(part.seconds / whole, 0.004)) },
            title: `${part.name} ${duration(part.seconds)}`,
          },
          part.seconds / whole > 0.09 ? part.name : "",
        ),
      ),
    ),
    h(
      "ul",
      { class: "legend" },
      parts.map((part, at) =>
        h(
          "li",
          { key: `${at}` },
          h("i", { class: slot(part), "aria-hidden": "true" }),
          h("span", null, part.name),
          h("b", null, duration(part.seconds), part.lasts ? " so far" : ""),
        ),
      ),
    ),
  );
}

/** Rectangles as large as their weights, at most `most` of them. `items`: [{key, weight, label, title, tone}]. */
export function treemap(items, { width = 960, height = 170, most = 200, label } = {}) {
  const shown = items
    .filter((item) => item.weight > 0)
    .sort((a, b) => b.weight - a.weight)
    .slice(0, most);
  if (shown.length === 0) return null;
  const total = shown.reduce((sum, item) => sum + item.weight, 0);
  const boxes = [];
  squarify(
    shown.map((item) => ({ item, area: (item.weight / total) * width * height })),
    { x: 0, y: 0, width, height },
    boxes,
  );
  return h(
    "svg",
    { class: "treemap", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
    boxes.map(({ item, x, y, width: wide, height: high }) =>
      h(
        "g",
        { key: item.key },
        h("rect", {
          class: `tone${item.tone}`,
          x: x + 1,
          y: y + 1,
          width: Math.max(0, wide - 2),
          height: Math.max(0, high - 2),
          rx: 2,
        }),
        h("title", null, item.title),
        wide > 60 && high > 18
          ? h("text", { x: x + 7, y: y + 16 }, clipped(item.label, Math.floor((wide - 12) / 7.2)))
          : null,
      ),
    ),
  );
}

function clipped(text, length) {
  return text.length <= length ? text : `${text.slice(0, Math.max(1, length - 1))}…`;
}

// Fills the shorter side row by row, and adds to a row while that makes its boxes squarer.
function squarify(areas, space, into) {
  let rest = areas;
  let box = space;
  while (rest.length > 0) {
    const side = Math.min(box.width, box.height);
    let taken = 1;
    while (taken < rest.length && worst(rest.slice(0, taken + 1), side) <= worst(rest.slice(0, taken), side))
      taken += 1;
    const row = rest.slice(0, taken);
    const sum = row.reduce((total, one) => total + one.area, 0);
    const depth = side > 0 ? sum / side : 0;
    const isUpright = box.width >= box.height;
    let along = 0;
    for (const one of row) {
      const length = depth > 0 ? one.area / depth : 0;
      into.push(
        isUpright
          ? { item: one.item, x: box.x, y: box.y + along, width: depth, height: length }
          : { item: one.item, x: box.x + along, y: box.y, width: length, height: depth },
      );
      along += length;
    }
    box = isUpright
      ? { x: box.x + depth, y: box.y, width: box.width - depth, height: box.height }
      : { x: box.x, y: box.y + depth, width: box.width, height: box.height - depth };
    rest = rest.slice(taken);
  }
}

function worst(row, side) {
  const sum = row.reduce((total, one) => total + one.area, 0);
  if (sum <= 0 || side <= 0) return Infinity;
  const [largest, smallest] = [row[0].area, row.at(-1).area];
  return Math.max((side * side * largest) / (sum * sum), (sum * sum) / (side * side * smallest));
}
