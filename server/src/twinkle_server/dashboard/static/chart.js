// Draws the curves of a run as SVG, follows new steps, and shows the values under the pointer.
"use strict";

const place = document.getElementById("curves");
const logScale = document.getElementById("log-scale");
const smoothing = document.getElementById("smoothing");
const NS = "http://www.w3.org/2000/svg";
const WIDTH = 360, HEIGHT = 130, LEFT = 54, RIGHT = 6, TOP = 8, BOTTOM = 18;
const charts = new Map();
let points = [];
let titles = {};
let loading = false;

const element = (name, attributes = {}, text = null) => {
  const made = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  return made;
};

const short = (value) => {
  const size = Math.abs(value);
  if (value !== 0 && (size < 0.001 || size >= 100000)) return value.toExponential(1);
  return String(Number(value.toPrecision(4)));
};

function smooth(values, strength) {
  if (!strength) return values;
  const keep = 1 - 1 / (1 + strength);
  let mean = null, weight = 0;
  return values.map(([step, value]) => {
    mean = mean === null ? value * (1 - keep) : mean * keep + value * (1 - keep);
    weight = weight * keep + (1 - keep);
    return [step, mean / weight];
  });
}

function chart(name) {
  const figure = document.createElement("figure");
  const caption = document.createElement("figcaption");
  const title = document.createElement("span");
  const output = document.createElement("output");
  title.textContent = titles[name] || name.replace(/^metric /, "");
  caption.append(title, output);
  const svg = element("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", tabindex: "0" });
  svg.setAttribute("aria-label", title.textContent);
  figure.dataset.metric = name;
  figure.append(caption, svg);
  place.append(figure);
  const made = { name, svg, output, shown: [], at: null };
  const point = (x) => {
    const box = svg.getBoundingClientRect();
    const wanted = ((x - box.left) / box.width) * WIDTH;
    made.at = nearest(made, wanted);
    draw(made);
  };
  svg.addEventListener("pointermove", (event) => point(event.clientX));
  svg.addEventListener("pointerleave", () => { made.at = null; draw(made); });
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move || !made.shown.length) return;
    event.preventDefault();
    const last = made.shown.length - 1;
    made.at = Math.min(last, Math.max(0, (made.at === null ? last : made.at) + move));
    draw(made);
  });
  return made;
}

function nearest(made, wanted) {
  let best = null;
  made.shown.forEach(([x], index) => {
    if (best === null || Math.abs(x - wanted) < Math.abs(made.shown[best][0] - wanted)) best = index;
  });
  return best;
}

function draw(made) {
  const raw = points.filter((point) => made.name in point).map((point) => [point.step, point[made.name]]);
  const log = logScale.checked && raw.some(([, value]) => value > 0);
  const values = log ? raw.filter(([, value]) => value > 0) : raw;
  made.svg.replaceChildren();
  made.shown = [];
  if (!values.length) return;
  const scale = log ? Math.log10 : (value) => value;
  let low = Math.min(...values.map(([, value]) => scale(value)));
  let high = Math.max(...values.map(([, value]) => scale(value)));
  if (high - low < 1e-12) { const pad = Math.abs(high) * 0.05 || 0.5; low -= pad; high += pad; }
  const first = values[0][0], last = values[values.length - 1][0];
  const x = (step) => LEFT + ((WIDTH - LEFT - RIGHT) * (step - first)) / Math.max(1, last - first);
  const y = (value) => TOP + ((HEIGHT - TOP - BOTTOM) * (high - scale(value))) / (high - low);
  for (let mark = 0; mark <= 3; mark++) {
    const level = low + ((high - low) * mark) / 3;
    const line = TOP + ((HEIGHT - TOP - BOTTOM) * (high - level)) / (high - low);
    made.svg.append(element("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: line, y2: line }));
    made.svg.append(element("text", { x: LEFT - 4, y: line + 3, "text-anchor": "end" }, short(log ? 10 ** level : level)));
  }
  made.svg.append(element("text", { x: LEFT, y: HEIGHT - 4 }, String(first)));
  made.svg.append(element("text", { x: WIDTH - RIGHT, y: HEIGHT - 4, "text-anchor": "end" }, `step ${last}`));
  const strength = Number(smoothing.value);
  const line = (entries, kind) => element("polyline", {
    class: kind, points: entries.map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`).join(" "),
  });
  made.svg.append(line(values, strength ? "raw faint" : "raw"));
  if (strength) made.svg.append(line(smooth(values, strength), "smooth"));
  if (values.length === 1) made.svg.append(element("circle", { cx: x(first), cy: y(values[0][1]), r: 3 }));
  made.shown = values.map(([step, value]) => [x(step), step, value]);
  const at = made.at !== null && made.at < made.shown.length ? made.at : null;
  const [, step, value] = made.shown[at === null ? made.shown.length - 1 : at];
  made.output.textContent = `step ${step}: ${short(value)}`;
  if (at !== null) {
    made.svg.append(element("line", { class: "hair", x1: x(step), x2: x(step), y1: TOP, y2: HEIGHT - BOTTOM }));
    made.svg.append(element("circle", { cx: x(step), cy: y(value), r: 3.5 }));
  }
}

function drawAll() {
  if (!points.length) return;
  const known = Object.keys(titles);
  const names = new Set(points.flatMap((point) => Object.keys(point)));
  names.delete("step");
  names.delete("time");
  const order = [...known.filter((name) => names.has(name)), ...[...names].filter((name) => !known.includes(name)).sort()];
  if (!charts.size) place.replaceChildren();
  for (const name of order) {
    if (!charts.has(name)) charts.set(name, chart(name));
    draw(charts.get(name));
  }
  place.dataset.steps = String(points[points.length - 1].step);
}

async function load() {
  if (loading || (document.hidden && points.length)) return;
  loading = true;
  try {
    const after = points.length ? points[points.length - 1].step : 0;
    const response = await fetch(`${place.dataset.url}?after=${after}`, { credentials: "same-origin", cache: "no-store" });
    if (!response.ok) return;
    const found = await response.json();
    titles = found.titles;
    if (found.points.length) {
      points = points.concat(found.points);
      drawAll();
    }
  } catch {
    // the service restarts; the next attempt shows it
  } finally {
    loading = false;
  }
}

logScale.addEventListener("change", drawAll);
smoothing.addEventListener("input", drawAll);
load();
setInterval(load, 2000);
