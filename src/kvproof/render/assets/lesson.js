"use strict";
(() => {
  const data = JSON.parse($("data").textContent);
  const pickRun = $("pick-run"), pickFault = $("pick-fault"), slider = $("pick-step");
  const HEADS = 2, WIDTH = 2;
  const text = (x, digits = 4) => (Number.isInteger(x) && digits === 0 ? String(x) : x.toFixed(digits).replace("-", "−"));
  const differs = (a, b) => a === undefined || b === undefined || Math.abs(a - b) >= 0.00005;
  const walkOf = (run, fault) => data.walks.find((walk) => walk.run === run && walk.fault === (fault || null));
  const now = () => walkOf(pickRun.value, pickFault.value) ?? walkOf(pickRun.value, "");
  const healthy = () => walkOf(pickRun.value, "");

  /* A value's numbers by its axes. */
  function at(numbers, ...index) {
    let place = 0;
    numbers.shape.forEach((size, axis) => { place = place * size + index[axis]; });
    return index.some((i, axis) => i >= numbers.shape[axis]) ? undefined : numbers.values[place];
  }
  const valueOf = (step, stage, layer = null) => step.values.find((v) => v.stage === stage && v.layer === layer);
  const isFirst = (walk, step, value) => walk.first && walk.first.position === step.position && walk.first.stage === value.stage && walk.first.layer === value.layer;

  function block(walk, step, value, body) {
    const [name, what] = data.stages[value.stage];
    const off = value.uncached !== null, first = isFirst(walk, step, value);
    return el("div", { class: `value${off ? " differs" : ""}${first ? " first" : ""}`, "data-stage": value.stage, "data-layer": value.layer },
      ...(first ? [el("span", { class: "tag" }, "first value that differs")] : off ? [el("span", { class: "tag" }, "differs")] : []),
      el("span", { class: "name" }, name), " ", el("span", { class: "what" }, what), body);
  }
  const number = (x, other, digits) => el("span", { class: `n${other !== null && differs(x, other) ? " off" : ""}` }, x === undefined ? "–" : text(x, digits));

  /* One row of numbers; the uncached row beneath it where the two differ. */
  function list(value, digits, labels = null) {
    const row = (numbers, other) => el("div", { class: "list" }, ...numbers.values.map((x, i) => el("span", {},
      ...(labels ? [el("span", { class: "side" }, `${labels[i]} `)] : []), number(x, other ? other.values[i] : null, digits))));
    return el("div", { class: "numbers" },
      el("span", { class: "side" }, value.uncached ? "cached" : ""), row(value.cached, value.uncached),
      ...(value.uncached ? [el("span", { class: "side" }, "uncached"), row(value.uncached, null)] : []));
  }
  function tokenNames(value) {
    const name = (numbers, off) => el("div", {}, el("span", { class: "token" }, data.vocabulary[numbers.values[0]]), el("span", { class: off ? "off" : "muted" }, ` id ${numbers.values[0]}`));
    return el("div", { class: "numbers" }, el("span", { class: "side" }, value.uncached ? "cached" : ""), name(value.cached, value.uncached !== null),
      ...(value.uncached ? [el("span", { class: "side" }, "uncached"), name(value.uncached, false)] : []));
  }
  /* Numbers a head: (head, head_dim). */
  function heads(value) {
    const row = (numbers, other) => el("div", { class: "list" }, ...d3.range(HEADS).map((head) => el("span", {}, el("span", { class: "side" }, `head ${head} `),
      number(at(numbers, head, 0), other ? at(other, head, 0) ?? NaN : null, 4), " ", number(at(numbers, head, 1), other ? at(other, head, 1) ?? NaN : null, 4))));
    return el("div", { class: "numbers" },
      el("span", { class: "side" }, value.uncached ? "cached" : ""), row(value.cached, value.uncached),
      ...(value.uncached ? [el("span", { class: "side" }, "uncached"), row(value.uncached, null)] : []));
  }
  /* A column a slot: keys, values, weights. */
  function slots(walk, step, value) {
    const isWeights = value.stage === "attn_weights", most = Math.max(value.cached.shape[1], value.uncached ? value.uncached.shape[1] : 0);
    const tokens = now().steps.map((s) => s.token), entry = (numbers, head, slot) => (isWeights ? [at(numbers, head, slot)] : d3.range(WIDTH).map((i) => at(numbers, head, slot, i)));
    const cell = (numbers, other, head, slot) => {
      const own = entry(numbers, head, slot), their = other ? entry(other, head, slot) : null;
      if (own[0] === undefined) return el("td", {}, "–");
      return el("td", { class: slot === step.position ? "new" : null }, ...own.flatMap((x, i) => [i ? " " : "", number(x, their ? their[i] ?? NaN : null, isWeights ? 3 : 4)]));
    };
    const rows = d3.range(HEADS).flatMap((head) => [
      el("tr", {}, el("th", { scope: "row" }, `head ${head}`), ...d3.range(most).map((slot) => cell(value.cached, value.uncached, head, slot))),
      ...(value.uncached ? [el("tr", { class: "uncached" }, el("th", { scope: "row" }, "uncached"), ...d3.range(most).map((slot) => cell(value.uncached, null, head, slot)))] : []),
    ]);
    return el("div", { class: "slots-box" }, el("table", { class: "slots" },
      el("thead", {}, el("tr", {}, el("td", {}), ...d3.range(most).map((slot) => el("th", { scope: "col", class: slot === step.position ? "new" : null }, slot <= step.position ? `${slot}: ${tokens[slot]}` : String(slot))))),
      el("tbody", {}, ...rows)));
  }
  /* Attention of one layer with every product written out, from the numbers that stand above it. */
  function byHand(step, layer) {
    const q = valueOf(step, "new_q", layer).cached, k = valueOf(step, "cache_k", layer).cached, v = valueOf(step, "cache_v", layer).cached, w = valueOf(step, "attn_weights", layer).cached;
    const lines = d3.range(HEADS).flatMap((head) => {
      const num = k.shape[1];
      const scores = d3.range(num).map((slot) => d3.sum(d3.range(WIDTH), (i) => at(q, head, i) * at(k, head, slot, i)) / Math.SQRT2);
      const top = d3.max(scores), total = d3.sum(scores, (s) => Math.exp(s - top));
      const term = (a, b) => `${text(a)}·${b < 0 ? `(${text(b)})` : text(b)}`;
      return [
        el("p", { class: "words" }, `Head ${head}: score = query · key ÷ √2`),
        ...scores.map((score, slot) => el("p", {}, `slot ${slot}: (${term(at(q, head, 0), at(k, head, slot, 0))} + ${term(at(q, head, 1), at(k, head, slot, 1))}) ÷ 1.4142 = ${text(score)}`)),
        el("p", { class: "words" }, "weight = e^score ÷ sum over all slots"),
        ...scores.map((score, slot) => el("p", {}, `slot ${slot}: ${text(Math.exp(score - top) / total)}, and the decoder has ${at(w, head, slot) === undefined ? "no such weight" : text(at(w, head, slot))}`)),
        el("p", { class: "words" }, "what the head reads = Σ weight × value"),
        el("p", {}, d3.range(WIDTH).map((i) => text(d3.sum(d3.range(Math.min(num, w.shape[1], v.shape[1])), (slot) => at(w, head, slot) * at(v, head, slot, i)))).join("  ")),
      ];
    });
    return el("details", { id: `hand-${layer}` }, el("summary", {}, "Check the attention by hand"), el("div", { class: "hand", tabindex: 0, role: "region", "aria-label": `Attention of layer ${layer} by hand` }, ...lines));
  }
  function sumByHand(step) {
    const token = valueOf(step, "token").cached.values[0], position = valueOf(step, "position").cached.values[0];
    const e = d3.range(4).map((i) => at(data.token_table, token, i)), p = d3.range(4).map((i) => at(data.position_table, position, i));
    return el("details", { id: "hand-sum" }, el("summary", {}, "Check the sum by hand"), el("div", { class: "hand", tabindex: 0, role: "region", "aria-label": "Embedding by hand" },
      el("p", {}, `embedding of ${data.vocabulary[token]}:  ${e.map((x) => text(x)).join("  ")}`), el("p", {}, `embedding of position ${position}:  ${p.map((x) => text(x)).join("  ")}`),
      el("p", {}, `sum:  ${e.map((x, i) => text(x + p[i])).join("  ")}`)));
  }

  /* What is wider than its box is scrolled, and so must be reached by keyboard. */
  function reachable() {
    for (const box of document.querySelectorAll(".slots-box")) {
      if (box.scrollWidth > box.clientWidth) {
        box.tabIndex = 0;
        box.setAttribute("role", "region");
        box.setAttribute("aria-label", box.closest(".value").querySelector(".name").textContent);
      }
    }
  }
  const open = new Set();
  function values(walk, step) {
    const show = (stage, layer = null) => {
      const value = valueOf(step, stage, layer);
      const body = ["new_q", "new_k", "new_v"].includes(stage) ? heads(value)
        : ["cache_k", "cache_v", "attn_weights"].includes(stage) ? slots(walk, step, value)
          : stage === "token" ? tokenNames(value)
            : list(value, ["position", "cache_len"].includes(stage) ? 0 : 4, stage === "logits" ? data.vocabulary : null);
      return block(walk, step, value, body);
    };
    const inLayer = ["attn_norm", "new_q", "new_k", "new_v", "cache_len", "cache_k", "cache_v", "attn_weights", "attn_out", "attn_residual", "mlp_out", "mlp_residual"];
    const card = (title, ...content) => el("div", { class: "card" }, el("h3", {}, title), ...content);
    $("values").replaceChildren(
      card("Token and position", show("token"), show("position"), show("embedding"), sumByHand(step)),
      el("div", { class: "layers" }, ...[0, 1].map((layer) => card(`Layer ${layer}`, ...inLayer.map((stage) => show(stage, layer)), byHand(step, layer)))),
      card("Logits", show("final_norm"), show("logits")),
    );
    reachable();
    for (const each of document.querySelectorAll("#values details")) {
      each.open = open.has(each.id);
      each.addEventListener("toggle", () => (each.open ? open.add(each.id) : open.delete(each.id)));
    }
  }

  function choice(walk, step) {
    const logits = valueOf(step, "logits").cached.values, top = d3.max(logits), total = d3.sum(logits, (x) => Math.exp(x - top));
    const all = data.vocabulary.map((token, i) => ({ token, p: Math.exp(logits[i] - top) / total }));
    const before = healthy().steps[step.position];
    $("policy").textContent = `Policy: ${walk.policy}.`;
    draw($("choice-chart"), (width) => Plot.plot({
      width: Math.min(width, 560), height: 8 * 24 + 24, marginLeft: 56, marginRight: 60, marginTop: 4, marginBottom: 20,
      x: { domain: [0, 1], axis: null }, y: { type: "band", domain: data.vocabulary, label: null },
      ariaLabel: `Probabilities: ${all.map(({ token, p }) => `${token} ${p.toFixed(4)}`).join(", ")}`,
      marks: [
        Plot.barX(all, { x: "p", y: "token", fill: (d) => (d.token === step.chosen ? "var(--accent)" : "var(--muted)"), fillOpacity: (d) => (d.token === step.chosen ? 1 : 0.55) }),
        Plot.ruleX([0], { stroke: "var(--line)" }),
        Plot.axisY({ tickSize: 0, fontSize: 12, label: null }),
        Plot.text(all, { x: "p", y: "token", text: (d) => d.p.toFixed(4), textAnchor: "start", dx: 5, fontSize: 12 }),
      ],
    }));
    const kept = walk.policy.startsWith("temperature")
      ? [el("p", {}, "Kept and scaled to one: ", ...step.kept.flatMap(({ token, p }, i) => [i ? ", " : "", el("span", { class: "token" }, token), ` ${p.toFixed(4)}`]), step.draw === null ? "" : `. The generator draws number ${step.draw}, counted from 0.`)] : [];
    const stop = step.stop === null ? "It is consumed next." : step.stop === "eos"
      ? `The run stops: ${step.chosen === "<eos>" ? "the end token was returned (stop reason eos)" : "the healthy run ends here (stop reason eos)"}. A returned token is not a consumed one: position ${step.position} is the last, so it could not be fed back.`
      : `The run stops: ${step.stop}.`;
    $("choice").replaceChildren(...kept,
      el("p", {}, "Chosen: ", el("span", { class: "token" }, step.chosen), `. ${stop}`),
      ...(step.chosen === before.chosen ? [] : [el("p", { class: "off" }, `The healthy run chooses ${before.chosen}.`)]));
  }

  function tokens(walk, number) {
    const chips = walk.steps.map((step, i) => el("li", { class: i === number ? "now" : i > number ? "later" : null, "aria-current": i === number ? "step" : null },
      el("b", {}, step.token), `position ${step.position}`, el("br"), el("span", { class: `gap${step.gap > data.allowed ? " off" : ""}` }, `gap ${shown(Number(step.gap.toPrecision(2)))}`)));
    const last = healthy().steps[healthy().steps.length - 1];
    chips.push(el("li", { class: "returned later" }, el("b", {}, last.chosen), "returned only"));
    $("tokens").replaceChildren(...chips);
  }

  function faultReadout(walk) {
    $("to-first").hidden = !walk.first;
    if (!walk.fault) {
      $("fault-readout").replaceChildren("The cache is healthy: every value agrees with the uncached path in the digits shown. ",
        `The largest gap of a row is ${shown(Number(d3.max(walk.steps, (s) => s.gap).toPrecision(2)))}, which is rounding; ${shown(data.allowed)} is allowed.`);
      return;
    }
    const first = walk.first;
    const rows = walk.steps.filter((s) => s.gap > data.allowed).length;
    const hidden = rows === 0 ? "No row of logits shows it." : `${rows} of ${walk.steps.length} rows of logits show it.`;
    $("fault-readout").replaceChildren(
      el("div", {}, el("span", { class: "badge diverged" }, walk.fault), ` ${walk.breaks}. ${hidden}`),
      el("div", {}, el("strong", {}, "First: "), `${first.sentence}.`),
      el("div", {}, el("strong", {}, "Contract broken: "), `${first.contract}.`));
  }

  function show() {
    const walk = now(), number = Math.min(Number(slider.value), walk.steps.length - 1), step = walk.steps[number];
    slider.max = walk.steps.length - 1;
    slider.setAttribute("aria-valuetext", `token ${number + 1} of ${walk.steps.length}`);
    $("step-back").disabled = number === 0;
    $("step-on").disabled = number === walk.steps.length - 1;
    tokens(walk, number);
    const off = step.values.filter((v) => v.uncached !== null);
    $("step-readout").replaceChildren(el("strong", {}, `Token ${number + 1} of ${walk.steps.length}: `), el("span", { class: "token" }, step.token), ` takes position ${step.position}. `,
      `Each layer's cache must hold ${step.position + 1} ${step.position ? "entries" : "entry"} a head after it. `,
      off.length ? `${off.length} of ${step.values.length} values differ from the uncached path.` : "Every value agrees with the uncached path.",
      ...(off.length && step.gap > data.allowed && step.same_choice ? [" The most likely token is the same all the same: chosen tokens alone would not show it."] : []));
    values(walk, step);
    choice(walk, step);
  }

  /* Which faults a check catches. */
  const CHECKS = {
    nothing: () => false,
    tokens: (walk, base) => walk.steps.some((step, i) => step.chosen !== base.steps[i].chosen),
    last: (walk) => walk.steps[walk.steps.length - 1].gap > data.allowed,
    rows: (walk) => walk.steps.some((step) => step.gap > data.allowed),
    values: (walk, base) => walk.steps.some((step, i) => step.values.some((v) => v.uncached !== null) || step.chosen !== base.steps[i].chosen),
  };
  const LESSONS = {
    nothing: "It also passes on the healthy cache, and that pass is worth nothing: this check cannot fail.",
    tokens: "A fault that leaves the most likely token in place goes unseen, however far it moves the rest of the row.",
    last: "A fault whose effect fades before the last token goes unseen: earlier prefixes were wrong.",
    rows: "What is left cancels in the logits, or lies in the policy.",
    values: "Every fault is caught, and the first value that differs says which contract it breaks.",
  };
  function checks() {
    const name = document.querySelector('input[name="check"]:checked').value, base = healthy();
    const walks = data.walks.filter((walk) => walk.run === pickRun.value && walk.fault), caught = walks.filter((walk) => CHECKS[name](walk, base));
    const missed = walks.length - caught.length;
    $("check-readout").replaceChildren(el("strong", {}, `Catches ${caught.length} of ${walks.length} faults of the ${pickRun.value} run. `), missed || name === "values" ? LESSONS[name] : "On this run it misses none; on the other run it may.");
    const head = el("tr", {}, el("th", { scope: "col" }, "Fault"), ...base.steps.map((step, i) => el("th", { scope: "col", class: "num" }, `prefix ${i + 1}`)), el("th", { scope: "col" }, "This check"));
    $("check-table").replaceChildren(el("thead", {}, head), el("tbody", {}, ...walks.map((walk) => el("tr", {}, el("th", { scope: "row" }, walk.fault, el("br"), el("span", { class: "muted small" }, walk.breaks)),
      ...walk.steps.map((step) => el("td", { class: "num" }, el("span", { class: step.gap > data.allowed ? "off" : null }, shown(Number(step.gap.toPrecision(2)))), step.same_choice ? "" : " ≠")),
      caught.includes(walk) ? el("td", { class: "catches" }, "✓ caught") : el("td", { class: "passes" }, "✗ let pass")))));
  }

  /* Answer first; then a hint; then the solution. */
  function questions() {
    const solved = new Set();
    data.questions.forEach((question, number) => {
      const form = $(`question-${number}`), find = (selector) => form.querySelector(selector);
      const hint = find(".show-hint"), solution = find(".show-solution"), outcome = find(".outcome");
      form.addEventListener("submit", (event) => {
        event.preventDefault();
        const given = new FormData(form).get(`answer-${number}`);
        if (given === null || given === "") {
          outcome.className = "outcome wrong";
          outcome.textContent = "Give an answer first.";
          return;
        }
        const right = Number(given) === question.right;
        outcome.className = `outcome ${right ? "right" : "wrong"}`;
        outcome.textContent = right ? "✓ Right." : "✗ Not that. Look again, or take the hint.";
        hint.hidden = right || !find(".hint").hidden;
        solution.hidden = right || find(".hint").hidden;
        if (right) { solved.add(number); find(".solution").hidden = false; }
        $("score").textContent = `${solved.size} of ${data.questions.length} solved.`;
      });
      hint.addEventListener("click", () => { find(".hint").hidden = false; hint.hidden = true; solution.hidden = false; solution.focus(); });
      solution.addEventListener("click", () => { find(".solution").hidden = false; solution.hidden = true; });
    });
  }

  const go = (number) => { slider.value = number; show(); };
  pickRun.addEventListener("change", () => {
    for (const option of pickFault.options) option.hidden = option.disabled = !walkOf(pickRun.value, option.value);
    if (!walkOf(pickRun.value, pickFault.value)) pickFault.value = "";
    faultReadout(now()); show(); checks();
  });
  pickFault.addEventListener("change", () => { const walk = now(); faultReadout(walk); go(walk.first ? Math.max(0, walk.steps.findIndex((s) => s.position === walk.first.position)) : Number(slider.value)); });
  slider.addEventListener("input", show);
  window.addEventListener("resize", reachable);
  $("step-back").addEventListener("click", () => go(Number(slider.value) - 1));
  $("step-on").addEventListener("click", () => go(Number(slider.value) + 1));
  $("to-first").addEventListener("click", () => { go(now().steps.findIndex((s) => s.position === now().first.position)); const mark = document.querySelector(".value.first"); if (mark) mark.scrollIntoView({ block: "center" }); });
  for (const each of document.querySelectorAll('input[name="check"]')) each.addEventListener("change", checks);
  pickRun.dispatchEvent(new Event("change"));
  questions();
  document.body.dataset.ready = "yes";
})();
