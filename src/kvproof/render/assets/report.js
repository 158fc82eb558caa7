"use strict";
(() => {
  const data = JSON.parse($("data").textContent);
  const bad = (verdict) => !["match", "rounding"].includes(verdict);
  const PASS = "var(--accent)", FAIL = "var(--bad)", QUIET = "var(--muted)";

  /* Scenario × rung, beside the numbers of the overview. */
  function overview() {
    const shownRows = data.scenarios.map((scenario, i) => ({ scenario, i })).filter(({ scenario }) => scenario.rows.length);
    if (!shownRows.length) return;
    const most = (scenario, name) => d3.max(scenario.rows, (row) => row[name]);
    const all = shownRows.flatMap(({ scenario }) => ["gap", "allowed", "top_gap"].map((name) => most(scenario, name)));
    const scale = logScale(all.filter((v) => v !== undefined && v !== null));
    const x = { type: "log", domain: scale.domain, axis: null }, y = { axis: null }, width = 260;
    const bounds = { width, marginLeft: 8, marginRight: 8 };
    const head = document.querySelector("#overview th.rung");
    head.append(picture(Plot.plot({ ...bounds, height: 18, marginTop: 17, marginBottom: 0, x, y,
      marks: [Plot.axisX(scale.ticks(6), { anchor: "top", label: null, tickFormat: scale.text, tickSize: 0, tickPadding: 1, fontWeight: 400, fontSize: 11 })] })));
    for (const { scenario, i } of shownRows) {
      const gap = most(scenario, "gap"), top = most(scenario, "top_gap"), allowed = most(scenario, "allowed");
      const fill = bad(scenario.verdict) ? FAIL : PASS;
      document.querySelector(`tr[data-scenario="${i}"] td.rung`).append(picture(Plot.plot({
        ...bounds, height: 20, marginTop: 0, marginBottom: 0, x, y,
        marks: [
          Plot.ruleY([0], { stroke: "var(--line)" }),
          Plot.ruleX([scale.clamp(allowed)], { stroke: "var(--text)", strokeWidth: 2 }),
          Plot.dot(top === undefined ? [] : [top], { x: scale.clamp, frameAnchor: "middle", symbol: "diamond", r: 5, stroke: fill, fill: "var(--bg)", strokeWidth: 1.6 }),
          Plot.dot([gap], { x: scale.clamp, frameAnchor: "middle", r: 4.5, fill }),
        ],
      })));
    }
    const hasTop = shownRows.some(({ scenario }) => scenario.rows.some((row) => row.top_gap !== null));
    legend($("rungs-legend"), [
      [swatch("dot", PASS), `largest ${data.dtype} gap`],
      ...(hasTop && data.dtype !== "float64" ? [[swatch("diamond", PASS, { hollow: true }), "largest float64 gap"]] : []),
      [swatch("tick", "var(--text)"), `allowed in ${data.dtype}`],
    ]);
  }

  /* A thing that is moved over a chart without drawing the chart again. */
  function cursor(svg, bottom) {
    const layer = d3.select(svg).append("g").attr("pointer-events", "none");
    const rule = layer.append("line").attr("stroke", "var(--text)").attr("stroke-dasharray", "2 3");
    const ring = layer.append("circle").attr("r", 8).attr("fill", "none").attr("stroke", "var(--text)").attr("stroke-width", 2);
    return (x, y, top = 8) => {
      rule.attr("x1", x).attr("x2", x).attr("y1", top).attr("y2", bottom);
      ring.attr("cx", x).attr("cy", y);
    };
  }

  /* Gap against position, and margins, of one scenario. */
  function positions() {
    const pick = $("pick-scenario"), slider = $("pick-row");
    if (!pick.options.length) { $("positions").hidden = true; return; }
    let rows = [], hasTop = false, moves = [];
    const byLength = (name) => d3.rollups(rows.filter((row) => row[name] !== null), (group) => d3.max(group, (row) => row[name]), (row) => row.n)
      .map(([n, value]) => ({ n, value })).sort((a, b) => a.n - b.n);
    const xAxis = () => {
      const low = d3.min(rows, (row) => row.n), high = d3.max(rows, (row) => row.n);
      return { domain: [low - 0.5, high + 0.5], label: "tokens in the prefix →", nice: false };
    };
    const xTicks = (width) => {
      const { domain: [low, high] } = xAxis(), step = Math.max(1, Math.ceil((high - low) / (width / 45)));
      return Plot.axisX(d3.range(Math.ceil(low), Math.floor(high) + 1).filter((n) => n % step === 0 || high - low < 2), { tickFormat: (n) => String(n), label: "tokens in the prefix →" });
    };
    const pointed = (svg) => svg.addEventListener("input", () => { if (svg.value) select(svg.value.i); });

    function gapChart(width) {
      const scale = logScale(rows.flatMap((row) => [row.gap, row.allowed, row.noise, row.top_gap]).filter((v) => v !== null));
      const y = (name) => (row) => scale.clamp(row[name]), line = (name, options) => Plot.lineY(byLength(name), { x: "n", y: (d) => scale.clamp(d.value), ...options });
      const svg = Plot.plot({
        width, height: 320, marginLeft: 48, marginRight: 12, marginTop: 12, marginBottom: 38, x: xAxis(),
        y: { type: "log", domain: scale.domain, grid: false, label: null },
        ariaLabel: "Gap of each row against the length of its prefix",
        marks: [
          Plot.gridY(scale.ticks(8), { stroke: "var(--line)", strokeOpacity: 1 }),
          Plot.axisY(scale.ticks(8), { tickFormat: scale.text, tickSize: 0, label: null }),
          xTicks(width),
          line("noise", { stroke: QUIET, strokeWidth: 1.5 }),
          line("allowed", { stroke: "var(--text)", strokeDasharray: "5 4", strokeWidth: 1.5 }),
          hasTop && data.dtype !== "float64" ? Plot.dot(rows, { x: "n", y: y("top_gap"), symbol: "diamond", r: 3.5, stroke: (row) => (bad(row.verdict) ? FAIL : PASS), strokeWidth: 1.4 }) : null,
          Plot.dot(rows, { x: "n", y: y("gap"), r: 3.5, fill: (row) => (bad(row.verdict) ? FAIL : PASS) }),
          Plot.dot(rows, Plot.pointer({ x: "n", y: y("gap"), r: 6, stroke: "none", maxRadius: 60 })),
        ],
      });
      pointed(svg);
      const move = cursor(svg, 320 - 38), sx = svg.scale("x"), sy = svg.scale("y");
      moves[0] = (row) => move(sx.apply(row.n), sy.apply(scale.clamp(row.gap)), 12);
      return svg;
    }
    function marginChart(width) {
      const scale = logScale(rows.flatMap((row) => [row.margin, 2 * row.gap]).filter((v) => v !== null));
      const safe = (row) => (row.choice === "safe" ? PASS : row.choice === "unexplained flip" ? FAIL : "var(--warn)");
      const svg = Plot.plot({
        width, height: 190, marginLeft: 48, marginRight: 12, marginTop: 12, marginBottom: 38, x: xAxis(),
        y: { type: "log", domain: scale.domain, label: null }, ariaLabel: "Margin of each row, and twice its gap",
        marks: [
          Plot.gridY(scale.ticks(5), { stroke: "var(--line)", strokeOpacity: 1 }),
          Plot.axisY(scale.ticks(5), { tickFormat: scale.text, tickSize: 0, label: null }),
          xTicks(width),
          Plot.dot(rows, { x: "n", y: (row) => scale.clamp(2 * row.gap), symbol: "times", r: 3, stroke: QUIET, strokeWidth: 1.5 }),
          Plot.dot(rows, { x: "n", y: (row) => scale.clamp(row.margin), r: 3.5, fill: safe }),
          Plot.dot(rows, Plot.pointer({ x: "n", y: (row) => scale.clamp(row.margin), r: 6, stroke: "none", maxRadius: 60 })),
        ],
      });
      pointed(svg);
      const move = cursor(svg, 190 - 38), sx = svg.scale("x"), sy = svg.scale("y");
      moves[1] = (row) => move(sx.apply(row.n), sy.apply(scale.clamp(row.margin)), 12);
      return svg;
    }
    function select(i) {
      const row = rows[i];
      slider.value = i;
      slider.setAttribute("aria-valuetext", `row ${i + 1} of ${rows.length}, after ${row.n} tokens`);
      for (const move of moves) if (move) move(row);
      const fact = (name, value) => el("div", {}, el("dt", {}, name), el("dd", {}, value));
      $("row-readout").replaceChildren(
        el("div", {}, el("span", { class: `badge ${row.verdict}` }, row.verdict), " after ", el("span", { class: "token" }, row.tokens),
          el("span", { class: "muted small" }, ` row ${i + 1} of ${rows.length}: ${row.n} token${row.n === 1 ? "" : "s"}`)),
        el("dl", { class: "facts tiles" },
          fact(`${data.dtype} gap`, shown(row.gap)), fact("allowed", shown(row.allowed)), fact("noise", shown(row.noise)),
          ...(row.top_gap === null ? [] : [fact("float64 gap", shown(row.top_gap))]),
          ...(row.cached_error === null ? [] : [fact("error, cached and uncached", `${shown(row.cached_error)}, ${shown(row.uncached_error)}`)]),
          fact("margin", `${shown(row.margin)}, ${row.choice}`)),
        el("div", { class: "muted small" }, row.reason),
      );
    }
    const worst = () => d3.maxIndex(rows, (row) => row.gap);
    function show() {
      rows = data.scenarios[Number(pick.value)].rows.map((row, i) => ({ ...row, i }));
      hasTop = rows.some((row) => row.top_gap !== null);
      moves = [];
      slider.max = rows.length - 1;
      draw($("gap-chart"), (width) => { const svg = gapChart(width); later(); return svg; });
      draw($("margin-chart"), (width) => { const svg = marginChart(width); later(); return svg; });
      legend($("gap-legend"), [
        [swatch("dot", PASS), `${data.dtype} gap, within what is allowed or rounding`],
        ...(rows.some((row) => bad(row.verdict)) ? [[swatch("dot", FAIL), "gap of a row that does not pass"]] : []),
        ...(hasTop && data.dtype !== "float64" ? [[swatch("diamond", PASS, { hollow: true }), "float64 gap"]] : []),
        [swatch("dashed", "var(--text)"), "allowed"], [swatch("line", QUIET), "noise"],
      ]);
      const flips = rows.some((row) => row.choice !== "safe");
      legend($("margin-legend"), [
        [swatch("dot", PASS), "margin, safe"], ...(flips ? [[swatch("dot", "var(--warn)"), "tie, or a flip that rounding explains"]] : []),
        ...(rows.some((row) => row.choice === "unexplained flip") ? [[swatch("dot", FAIL), "flip that nothing explains"]] : []),
        [swatch("cross", QUIET), "twice the gap"],
      ]);
      const failing = rows.findIndex((row) => bad(row.verdict));
      select(failing < 0 ? worst() : failing);
    }
    const later = () => queueMicrotask(() => { if (rows[slider.value]) select(Number(slider.value)); });
    pick.addEventListener("change", show);
    slider.addEventListener("input", () => select(Number(slider.value)));
    $("worst-row").addEventListener("click", () => select(worst()));
    show();
  }

  /* Stage × token, and what the cache held, one call after another. */
  function spreads() {
    if (!data.spreads.length) return;
    const pick = $("pick-spread"), slider = $("pick-call"), pickLayer = $("pick-layer"), MOST = 48;
    let now, lines, calls, first, moveHeat = null;

    function load() {
      now = data.spreads[Number(pick.value)];
      calls = d3.groups(now.tokens.map(([call, batchRow, position, token], column) => ({ call, batchRow, position, token, column })), (t) => t.call);
      first = null;
      for (const [, tokens] of calls) {
        for (let site = 0; site < now.sites.length && !first; site++) {
          const wrong = tokens.find(({ column }) => now.gaps[site][column] !== null && now.gaps[site][column] > now.sites[site][2]);
          if (wrong) first = { site, column: wrong.column, call: wrong.call };
        }
        if (first) break;
      }
      const layers = [...new Set(now.sites.map(([, layer]) => layer))].filter((layer) => layer !== null);
      const grouped = now.sites.length > MOST && layers.length > 1;
      $("layer-label").hidden = !grouped;
      pickLayer.replaceChildren(...layers.map((layer) => el("option", { value: layer }, `layer ${layer}`)));
      const own = first === null ? null : now.sites[first.site][1];
      pickLayer.value = own === null ? layers[0] : own;
      slider.max = calls.length - 1;
      slider.value = first === null ? calls.length - 1 : calls.findIndex(([call]) => call === first.call);
      $("step-first").hidden = first === null;
      layOut();
      heatLegend($("heat-legend"), first === null ? [] : [[swatch("box", "var(--text)", { hollow: true }), "first mismatch"]]);
      const keeps = now.kept.length > 0;
      $("cache-chart").hidden = !keeps;
      $("cache-title").hidden = !keeps;
      document.querySelector(".heat").classList.toggle("wide", !keeps);
      step();
    }
    /* The rows of the heat map: every site, or each layer as one but for the one that is picked. */
    function layOut() {
      const grouped = !$("layer-label").hidden, open = Number(pickLayer.value);
      lines = [];
      now.sites.forEach(([name, layer], site) => {
        const last = lines[lines.length - 1];
        if (!grouped || layer === null || layer === open) lines.push({ name: short(name, layer, grouped), sites: [site], layer });
        else if (last && last.layer === layer && last.whole) last.sites.push(site);
        else lines.push({ name: `layer ${layer}`, sites: [site], layer, whole: true });
      });
      draw($("spread-chart"), heatMap);
    }
    function short(name, layer, grouped) {
      const plain = name.replace(/^the output of /, "");
      if (layer === null) return plain;
      const inside = plain.replace(new RegExp(`^.*\\.${layer}(\\.|$)`), "").replace(` of layer ${layer}`, "");
      return `${layer} · ${inside || "whole layer"}`;
    }
    function worstOf(line, column) {
      let worst = null;
      for (const site of line.sites) {
        const gap = now.gaps[site][column];
        if (gap === null) continue;
        const ratio = gap > now.sites[site][2];
        if (!worst || (ratio && !worst.wrong) || (ratio === worst.wrong && gap > worst.gap)) worst = { site, gap, wrong: ratio };
      }
      return worst;
    }
    function heatMap(width) {
      const small = width < 480, most = small ? 17 : 30;
      const left = Math.min(small ? 122 : 205, 14 + 6.6 * d3.max(lines, (line) => Math.min(line.name.length, most)));
      const num = now.tokens.length, wide = (width - left - 6) / num, size = lines.length > 70 ? 9 : lines.length > 40 ? 12 : 16;
      const cells = lines.flatMap((line, row) => now.tokens.map((token, column) => ({ row, column, worst: worstOf(line, column) }))).filter((cell) => cell.worst);
      const top = 40, height = top + lines.length * size + 4;
      const every = Math.max(1, Math.ceil(20 / wide)), fits = Math.floor((wide - 2) / 6.6), names = fits >= 2;
      const svg = Plot.plot({
        width, height, marginLeft: left, marginRight: 6, marginTop: top, marginBottom: 4,
        x: { type: "band", round: false, domain: d3.range(num), padding: wide > 8 ? 0.08 : 0 }, y: { type: "band", round: false, domain: d3.range(lines.length), padding: size > 10 ? 0.1 : 0 },
        ariaLabel: "Gap of each value, stage by token",
        marks: [
          Plot.axisX(d3.range(num).filter((i) => i % every === 0), { anchor: "top", tickSize: 0, label: null, tickFormat: (i) => String(now.tokens[i][2]), fill: QUIET, fontSize: 10, dy: names ? -14 : 0 }),
          names ? Plot.axisX(d3.range(num), { anchor: "top", tickSize: 0, label: null, tickFormat: (i) => cut(now.tokens[i][3], fits), fontSize: 11 }) : null,
          Plot.text(["position"], { frameAnchor: "top-left", textAnchor: "end", dx: -6, dy: names ? -31 : -17, fontSize: 10, fill: QUIET, text: (d) => d }),
          Plot.axisY(d3.range(lines.length), { tickSize: 0, label: null, tickFormat: (i) => cut(lines[i].name, most), fontSize: size < 11 ? 9 : 11 }),
          Plot.cell(cells, {
            x: "column", y: "row", fill: (cell) => heat(cell.worst.gap, now.sites[cell.worst.site][2]),
            title: (cell) => `${now.sites[cell.worst.site][0]}\n${now.tokens[cell.column][3]} at position ${now.tokens[cell.column][2]}\ngap ${shown(cell.worst.gap)} of its size, allowed ${shown(now.sites[cell.worst.site][2])}`,
            tip: { maxRadius: 20, preferredAnchor: "top-left" },
          }),
        ],
      });
      const sx = svg.scale("x"), sy = svg.scale("y"), layer = d3.select(svg).append("g").attr("pointer-events", "none");
      const edge = (column) => sx.apply(column) - (sx.step - sx.bandwidth) / 2;
      const frame = layer.append("rect").attr("y", top - 2).attr("height", height - top).attr("fill", "none").attr("stroke", "var(--accent)").attr("stroke-width", 2).attr("rx", 2);
      if (first) {
        const row = lines.findIndex((line) => line.sites.includes(first.site));
        layer.append("rect").attr("x", sx.apply(first.column) - 1.5).attr("y", sy.apply(row) - 1.5).attr("width", sx.bandwidth + 3)
          .attr("height", sy.bandwidth + 3).attr("fill", "none").attr("stroke", "var(--text)").attr("stroke-width", 2.5);
      }
      moveHeat = (tokens) => {
        const from = edge(d3.min(tokens, (t) => t.column)), to = edge(d3.max(tokens, (t) => t.column)) + sx.step;
        frame.attr("x", from).attr("width", to - from);
      };
      moveHeat(calls[Number(slider.value)][1]);
      return svg;
    }
    function cachePicture(width) {
      const call = calls[Number(slider.value)][0];
      const slots = [...new Set(now.kept.map((k) => k[3]))].sort((a, b) => a - b), layers = [...new Set(now.kept.map((k) => k[2]))].sort((a, b) => a - b);
      const held = now.kept.filter(([from, to]) => from <= call && call <= to);
      const left = 58, wide = (width - left - 6) / slots.length, size = layers.length > 40 ? 9 : layers.length > 16 ? 14 : 22;
      const texts = new Map(held.map((k) => [k[3], k])), every = Math.max(1, Math.ceil(20 / wide)), top = 40, fits = Math.floor((wide - 2) / 6.6), names = fits >= 2;
      return Plot.plot({
        width, height: top + layers.length * size + 4, marginLeft: left, marginRight: 6, marginTop: top, marginBottom: 4,
        x: { type: "band", round: false, domain: slots, padding: wide > 8 ? 0.1 : 0 }, y: { type: "band", round: false, domain: layers, padding: 0.12 },
        ariaLabel: "What each slot of each layer's cache holds",
        marks: [
          Plot.axisX(slots.filter((i) => i % every === 0), { anchor: "top", tickSize: 0, label: null, tickFormat: (i) => String(texts.has(i) ? texts.get(i)[4] : ""), fill: QUIET, fontSize: 10, dy: names ? -14 : 0 }),
          names ? Plot.axisX(slots, { anchor: "top", tickSize: 0, label: null, fontSize: 11, tickFormat: (i) => (texts.has(i) ? cut(texts.get(i)[5], fits) : "") }) : null,
          Plot.text(["position"], { frameAnchor: "top-left", textAnchor: "end", dx: -6, dy: names ? -31 : -17, fontSize: 10, fill: QUIET, text: (d) => d }),
          Plot.axisY(layers.filter((layer) => size > 10 || layer % 2 === 0), { tickSize: 0, label: null, tickFormat: (layer) => `layer ${layer}`, fontSize: size < 11 ? 9 : 11 }),
          Plot.cell(d3.cross(slots, layers), { x: (d) => d[0], y: (d) => d[1], fill: "var(--empty)", stroke: "var(--line)" }),
          Plot.cell(held, {
            x: (k) => k[3], y: (k) => k[2], fill: (k) => (k[7] ? heat(Math.max(k[6], 1e-12), 0) : "var(--heat-0)"), stroke: (k) => (k[7] ? "var(--bad)" : "var(--line)"), strokeWidth: 1.2,
            title: (k) => `layer ${k[2]}, slot ${k[3]}\nmust hold ${k[5]}, position ${k[4]}\ngap ${shown(k[6])} of its size${k[8] ? `\nholds ${k[8]}` : ""}`, tip: { maxRadius: 20 },
          }),
          wide >= 12 && size >= 14 ? Plot.text(held.filter((k) => k[7]), { x: (k) => k[3], y: (k) => k[2], text: () => "×", fill: "var(--bg)", fontWeight: 700, pointerEvents: "none" }) : null,
        ],
      });
    }
    function step() {
      const number = Number(slider.value), [call, tokens] = calls[number];
      const columns = tokens.map((t) => t.column);
      let worst = null, numWrong = 0, start = null;
      now.sites.forEach(([name, , allowed], site) => {
        const gap = d3.max(columns, (column) => now.gaps[site][column]);
        if (gap === undefined || gap === null) return;
        if (gap > allowed) { numWrong += 1; start = start ?? { name, gap, allowed }; }
        if (!worst || gap > worst.gap) worst = { name, gap, allowed };
      });
      slider.setAttribute("aria-valuetext", `call ${number + 1} of ${calls.length}`);
      $("step-back").disabled = number === 0;
      $("step-on").disabled = number === calls.length - 1;
      const names = tokens.slice(0, 4).flatMap((t, i) => [i ? ", " : "", el("span", { class: "token" }, t.token), ` at position ${t.position}`]);
      const more = tokens.length > 4 ? ` and ${tokens.length - 4} more` : "";
      $("call-readout").replaceChildren(
        el("div", {}, el("strong", {}, `Call ${number + 1} of ${calls.length}`), " consumes ", ...names, more, "."),
        el("div", {}, start
          ? `The first value beyond what is allowed is ${start.name}: gap ${shown(start.gap)} of its size. ${numWrong} of ${now.sites.length} stages differ.`
          : worst ? `Nothing is beyond what is allowed; the largest gap is ${shown(worst.gap)} of its value's size, at ${worst.name}.` : "Nothing was compared."),
        ...(now.leftOut && number === calls.length - 1 ? [el("div", { class: "muted small" }, "The program consumes more tokens than are shown here.")] : []),
      );
      if (moveHeat) moveHeat(tokens);
      if (!now.kept.length) { $("cache-readout").textContent = ""; return; }
      draw($("cache-chart"), cachePicture);
      const held = now.kept.filter(([from, to]) => from <= call && call <= to), wrong = held.filter((k) => k[7]);
      $("cache-readout").replaceChildren(...(wrong.length
        ? [el("p", {}, `${wrong.length} of ${held.length} slots do not hold what they must:`), el("ul", {}, ...wrong.slice(0, 5).map((k) =>
          el("li", {}, `layer ${k[2]}, slot ${k[3]} must hold `, el("span", { class: "token" }, k[5]), ` of position ${k[4]}`, k[8] ? ` and holds ${k[8]}` : "", `; gap ${shown(k[6])}`)), ...(wrong.length > 5 ? [el("li", {}, `and ${wrong.length - 5} more`)] : []))]
        : [el("p", {}, held.length ? `All ${held.length} slots hold what they must.` : "The cache is empty.")]));
    }
    const go = (number) => { slider.value = number; step(); };
    pick.addEventListener("change", load);
    pickLayer.addEventListener("change", () => { layOut(); step(); });
    slider.addEventListener("input", step);
    $("step-back").addEventListener("click", () => go(Number(slider.value) - 1));
    $("step-on").addEventListener("click", () => go(Number(slider.value) + 1));
    $("step-first").addEventListener("click", () => go(calls.findIndex(([call]) => call === first.call)));
    load();
  }

  /* Margins of generated tokens, one panel a run. */
  function runs() {
    const box = $("runs-chart");
    if (!box) return;
    const steps = data.runs.flatMap((run) => run.steps.map((step, i) => ({ ...step, run: run.name, i })));
    const scale = logScale(steps.flatMap((step) => [step.margin, 2 * step.error]));
    draw(box, (width) => {
      const stacked = width < 560, facet = stacked ? { fy: "run" } : { fx: "run" }, num = data.runs.length;
      return Plot.plot({
        width, height: stacked ? 150 * num + 20 : 220, marginLeft: 48, marginRight: stacked ? 24 : 8, marginTop: 26, marginBottom: 24, [stacked ? "fy" : "fx"]: { domain: data.runs.map((run) => run.name), label: null, axis: stacked ? null : "top" },
        x: { type: "point", domain: d3.range(d3.max(steps, (s) => s.i) + 1), axis: null, padding: 0.6 }, y: { type: "log", domain: scale.domain, label: null },
        ariaLabel: "Margin of each generated token, and twice the gap of the two paths",
        marks: [
          Plot.gridY(scale.ticks(6), { stroke: "var(--line)", strokeOpacity: 1 }),
          Plot.axisY(scale.ticks(6), { tickFormat: scale.text, tickSize: 0, label: null }),
          stacked ? Plot.text(data.runs, { fy: "name", text: "name", frameAnchor: "top-left", dy: -14 }) : null,
          Plot.ruleX(steps, { ...facet, x: "i", y1: (s) => scale.clamp(2 * s.error), y2: (s) => scale.clamp(s.margin), stroke: "var(--line)", strokeWidth: 2 }),
          Plot.dot(steps, { ...facet, x: "i", y: (s) => scale.clamp(2 * s.error), symbol: "times", r: 4, stroke: QUIET, strokeWidth: 1.6 }),
          Plot.dot(steps, { ...facet, x: "i", y: (s) => scale.clamp(s.margin), r: 4.5, fill: (s) => (s.margin > 2 * s.error ? PASS : "var(--warn)") }),
          Plot.text(steps, { ...facet, x: "i", frameAnchor: "bottom", dy: 16, text: (s) => cut(s.token, 10), fontSize: 12 }),
        ],
      });
    });
    legend($("runs-legend"), [[swatch("dot", PASS), "margin of the chosen token's row"], [swatch("cross", QUIET), "twice the gap of the two paths"]]);
  }

  /* What stands further down is drawn once the page can be read and used. */
  const later = window.requestIdleCallback ?? setTimeout;
  overview();
  positions();
  later(() => {
    spreads();
    runs();
    document.body.dataset.ready = "yes";
  });
})();
