"use strict";
/* What every page draws with: elements, numbers as text, logarithmic axes, marks that move. Text is set as text. */
const $ = (id) => document.getElementById(id);
const BEYOND = 1e300; // what is not finite stands for itself as this

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

function superscript(whole) {
  return String(whole).replace("-", "⁻").replace(/\d/g, (digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]);
}

function shown(value) {
  if (value === null || value === undefined) return "–";
  if (Math.abs(value) >= BEYOND) return "not finite";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 0.01 && size < 10000) return String(Number(value.toPrecision(4))).replace("-", "−");
  const [mantissa, exponent] = value.toExponential(1).split("e");
  return `${mantissa.replace("-", "−")} × 10${superscript(Number(exponent))}`;
}

/* A logarithmic scale over some numbers, none and zero and infinity among them. */
function logScale(values, pad = 0.35) {
  const logs = values.filter((v) => v > 0 && v < BEYOND).map(Math.log10);
  const hasZero = values.some((v) => v === 0);
  const hasBeyond = values.some((v) => v >= BEYOND);
  let low = logs.length ? Math.min(...logs) : -1, high = logs.length ? Math.max(...logs) : 0;
  if (high - low < 1.5) { low -= 0.75; high += 0.75; }
  const floor = 10 ** (hasZero ? Math.floor(low) - 1 : low - pad), ceiling = 10 ** (hasBeyond ? Math.ceil(high) + 1 : high + pad);
  const clamp = (v) => v === null || v === undefined ? NaN : v >= BEYOND ? ceiling : v <= 0 ? floor : v;
  const first = Math.ceil(Math.log10(floor) - 1e-9), last = Math.floor(Math.log10(ceiling) + 1e-9);
  const ticks = (most) => {
    const step = Math.max(1, Math.ceil((last - first + 1) / most));
    return d3.range(first, last + 1).filter((e) => (e - last) % step === 0).map((e) => 10 ** e);
  };
  const text = (v) => hasZero && v <= floor * 1.01 ? "0" : `10${superscript(Math.round(Math.log10(v)))}`;
  return { clamp, floor, ceiling, domain: [floor, ceiling], ticks, text, hasZero };
}

/* Draws into a box, and again when the box changes its width. */
const drawings = new Map();
function draw(box, make) {
  drawings.set(box, make);
  redraw(box);
  watcher.observe(box);
}
function redraw(box) {
  const width = Math.floor(box.clientWidth);
  const make = drawings.get(box);
  if (!make || width < 40) return;
  box.dataset.width = width;
  box.replaceChildren(picture(make(width)));
}
/* One picture to those who do not see it, named by its label; the same numbers stand beside it as text. */
function picture(svg) {
  svg.setAttribute("role", "img");
  for (const group of svg.querySelectorAll("g[aria-label]")) {
    group.dataset.mark = group.getAttribute("aria-label");
    group.removeAttribute("aria-label");
    group.removeAttribute("aria-description");
  }
  return svg;
}
const watcher = new ResizeObserver((entries) => {
  for (const entry of entries) {
    if (Math.abs(entry.target.clientWidth - Number(entry.target.dataset.width || 0)) > 1) redraw(entry.target);
  }
});

function legend(list, entries) {
  if (!list) return;
  list.replaceChildren(...entries.map(([mark, text]) => el("li", {}, mark, text)));
}
function swatch(shape, colour, { hollow = false } = {}) {
  const svg = d3.create("svg").attr("width", 18).attr("height", 14).attr("viewBox", "-9 -7 18 14");
  if (shape === "line" || shape === "dashed") {
    svg.append("path").attr("d", "M-9,0H9").attr("stroke", colour).attr("stroke-width", 2)
      .attr("stroke-dasharray", shape === "dashed" ? "4 3" : null);
  } else if (shape === "tick") {
    svg.append("path").attr("d", "M0,-7V7").attr("stroke", colour).attr("stroke-width", 2);
  } else if (shape === "box") {
    svg.append("rect").attr("x", -7).attr("y", -6).attr("width", 14).attr("height", 12).attr("fill", hollow ? "none" : colour)
      .attr("stroke", hollow ? colour : "var(--line)").attr("stroke-width", hollow ? 2 : 1);
  } else {
    svg.append("path").attr("d", d3.symbol(shape === "diamond" ? d3.symbolDiamond : shape === "cross" ? d3.symbolTimes : d3.symbolCircle, 46)())
      .attr("fill", hollow || shape === "cross" ? "none" : colour).attr("stroke", colour).attr("stroke-width", 1.6);
  }
  return svg.node();
}

/* How wrong a value is, in six steps: its gap as a part of the largest magnitude at its place. */
const HEAT = [[-6, "below 10⁻⁶"], [-4, "to 10⁻⁴"], [-2, "to 0.01"], [-1, "to 0.1"], [0, "to 1"], [Infinity, "beyond"]];
function heat(gap, allowed) {
  if (gap === null || gap === undefined) return "none";
  if (gap <= allowed) return "var(--heat-0)";
  const size = Math.log10(gap);
  return `var(--heat-${1 + HEAT.findIndex(([limit]) => size < limit)})`;
}
function heatLegend(list, more = []) {
  const box = (colour) => el("i", { style: `background:${colour}` });
  legend(list, [
    [box("var(--heat-0)"), "within what is allowed"],
    ...HEAT.map(([, text], i) => [box(`var(--heat-${i + 1})`), i === 0 ? `gap ${text} of the value's size` : text]),
    ...more,
  ]);
}

const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

window.addEventListener("beforeprint", () => {
  for (const each of document.querySelectorAll("details")) each.open = true;
});
