// Curves. One group of runs (repeats of one experiment) gets a colour per series; several groups get
// a colour per group, and each chart shows one series at a time. Repeats are drawn as their mean with
// a band from the lowest to the highest. All charts show one cursor at the same step.

const view = { smooth: 5, axis: "step", cursor: null, hiddenGroups: new Set(), charts: [] };

const SMOOTHING = [{ value: 1, label: "raw" }, { value: 5, label: "5" }, { value: 10, label: "10" }, { value: 20, label: "20" }];

// -- series ------------------------------------------------------------------------------------

function column(name, change = (value) => value) {
  return (run) => (run.columns[name] ?? []).map((value) => (isNumber(value) ? change(value) : null));
}

function ratio(above, below) {
  return (run) => (run.columns[above] ?? []).map((value, index) => {
    const by = run.columns[below]?.[index];
    return isNumber(value) && isNumber(by) && by > 0 ? value / by : null;
  });
}

// What remains of the step after its named phases.
function otherSeconds(run) {
  return (run.columns["time/step_seconds"] ?? []).map((value, index) => {
    const named = ["time/sample_seconds", "time/train_seconds"].map((name) => run.columns[name]?.[index]);
    return isNumber(value) && named.every(isNumber) ? Math.max(0, value - named[0] - named[1]) : null;
  });
}

function named(name, label, change) {
  return { label, values: column(name, change), meaning: report.metrics[name]?.meaning };
}

function allNames() {
  return [...new Set(report.runs.flatMap((run) => Object.keys(run.columns)))];
}

function chartSpecs() {
  const names = allNames();
  const summaries = new Set(["reward/mean", "reward/std", "reward/min", "reward/max"]);
  const parts = names.filter((name) => name.startsWith("reward/") && !summaries.has(name));
  const mismatchOf = (family) => [
    named(`${family}/k3`, "k3"),
    named(`${family}/k2`, "k2"),
    named(`${family}/k1`, "|k1|", Math.abs),
    named(`${family}/max_abs_diff`, "largest difference"),
  ];
  // Where the mismatch is: one curve per turn, place in the row, kind of token, or age.
  const mismatchBy = (part, title) => ({ title, unit: "nats", isLog: true,
    series: names.filter((name) => name.startsWith(`mismatch/by_${part}/`) && name.endsWith("/k3"))
      .map((name) => ({ ...named(name, name.split("/")[2]), start: parseInt(name.split("/")[2], 10) || 0 }))
      .sort((a, b) => a.start - b.start) });
  return [
    { title: "Reward", unit: "reward", isWide: true,
      series: [named("reward/mean", "mean"), ...parts.map((name) => named(name, name.slice(7).replaceAll("_", " ")))] },
    { title: "Mismatch of sampler and trainer", unit: "nats", isWide: true, isLog: true, hasLimits: true,
      series: mismatchOf("mismatch") },
    { title: "Held-out evaluation", unit: "reward", hasPoints: true,
      series: Object.entries(report.held_out).filter(([name]) => name !== "eval/loss").map(([name, label]) => named(name, label)) },
    { title: "Loss", unit: "nats", series: [named("train/loss", "loss"), named("eval/loss", "held out")] },
    { title: "Gradient norm", unit: "1", series: [
      named("train/grad_norm", "before clipping"), named("critic/grad_norm", "of the critic")] },
    { title: "Learning rate", unit: "1", series: [named("train/lr", "policy"), named("critic/lr", "critic")] },
    { title: "Truncated and failed episodes", unit: "share", series: [
      { label: "truncated", values: ratio("episodes/truncated", "episodes/total"), meaning: "Share of the episodes that a limit ended." },
      { label: "failed", values: ratio("episodes/failed", "episodes/total"), meaning: "Share of the episodes that broke and were not trained on." },
      ...names.filter((name) => name.startsWith("episodes/cut/")).map((name) => (
        { label: `cut by ${name.slice(13)}`, values: ratio(name, "episodes/total"), meaning: "Share of the episodes that this limit cut, or a turn of theirs." }))] },
    { title: "Groups without a signal", unit: "share", series: [
      { label: "no signal", values: ratio("episodes/without_signal", "episodes/groups"), meaning: "Share of the groups whose episodes all got one reward." },
      { label: "replaced", values: ratio("signal/replaced", "episodes/groups"), meaning: "Groups that others were played for, for each group of the step." }] },
    { title: "Tool errors", unit: "share", series: names.filter((name) => name.startsWith("tool/answered/")).map((name) => (
      { label: name.slice(14), values: ratio(name.replace("answered", "failed"), name), meaning: "Share of this tool's calls that were answered with an error." })) },
    { title: "Entropy", unit: "nats", series: [named("train/entropy", "entropy")] },
    { title: "Clip fraction", unit: "share", series: [
      named("train/clip_fraction", "clipped tokens"), named("critic/clip_fraction", "clipped values")] },
    { title: "Critic: loss", unit: "1", series: [named("critic/loss", "loss")] },
    { title: "Critic: explained variance", unit: "1", series: [named("critic/explained_variance", "of the returns")] },
    { title: "Critic: values", unit: "reward", series: [
      named("critic/value_mean", "value"), named("critic/return_mean", "return")] },
    { title: "Experts: load", unit: "1", series: [
      named("moe/load_max", "largest over even"), named("moe/load_cv", "variation"), named("moe/unused_experts", "share unused")] },
    { title: "Experts: routes", unit: "share", series: [
      named("routing/replayed_share", "replayed"), named("routing/differing_share", "would differ")] },
    { title: "Response length", unit: "tokens", series: [named("response_length/mean", "mean"), named("response_length/max", "longest")] },
    { title: "Speed", unit: "tokens/s", series: [
      { label: "sampling", values: ratio("tokens/sampled", "time/sample_seconds"), meaning: "Sampled tokens per second of sampling." },
      { label: "training", values: ratio("tokens/trained", "time/train_seconds"), meaning: "Trained tokens per second of training." }] },
    { title: "Time per step", unit: "seconds", series: [
      named("time/sample_seconds", "sampling"), named("time/train_seconds", "training"),
      { label: "other", values: otherSeconds, meaning: "The rest of the step." }] },
    { title: "Correction: tokens", unit: "share", series: [
      named("correction/rejected_share", "rejected"), named("correction/above_share", "weight above its limit"),
      named("correction/below_share", "weight below its limit"), named("correction/rejected_sequences_share", "rows rejected")] },
    { title: "Correction: weights", unit: "1", series: [
      named("correction/weight_mean", "mean"), named("correction/ess", "effective sample size"), named("correction/normalizer", "divided by")] },
    { title: "Mismatch of the averaged behaviour", unit: "nats", isLog: true, series: mismatchOf("mismatch_averaged") },
    { title: "Mismatch: numerics and staleness (k3)", unit: "nats", series: [
      named("mismatch/k3_numerics", "numerics"), named("mismatch/k3_staleness", "staleness")] },
    mismatchBy("age", "Mismatch by age (k3)"),
    mismatchBy("turn", "Mismatch by turn (k3)"),
    mismatchBy("position", "Mismatch by place in the row (k3)"),
    mismatchBy("kind", "Mismatch by kind of token (k3)"),
    { title: "Mismatch after the update", unit: "nats", isLog: true, hasPoints: true, series: mismatchOf("mismatch_after") },
  ].map((spec) => ({
    ...spec,
    series: spec.series.filter((series) => report.runs.some((run) => series.values(run).some(isNumber))),
  })).filter((spec) => spec.series.length).map((spec) => ({ ...spec, flat: flatText(spec) }));
}

// In words, if the chart would show nothing but level lines; null if something moves. One point is
// no line: it is level only at zero, which says that there was nothing to count.
function flatText(spec) {
  const texts = new Map();
  for (const series of spec.series) {
    const values = report.runs.flatMap((run) => series.values(run).filter(isNumber));
    if (values.some((value) => value !== values[0]) || (values.length === 1 && values[0] !== 0)) return null;
    const text = formatNumber(values[0], spec.unit);
    texts.set(text, [...(texts.get(text) ?? []), series.label]);
  }
  return texts.size === 1 ? [...texts.keys()][0] : [...texts].map(([text, labels]) => `${labels.join(", ")} ${text}`).join("; ");
}

// Mean, lowest and highest over a group's runs, at every step that one of them has.
function groupCurve(group, series) {
  const byStep = new Map();
  for (const index of group.runs) {
    const run = report.runs[index];
    const seconds = elapsedSeconds(run);
    series.values(run).forEach((value, at) => {
      if (value === null) return;
      const entry = byStep.get(run.steps[at]) ?? { values: [], seconds: [] };
      entry.values.push(value);
      entry.seconds.push(seconds[at]);
      byStep.set(run.steps[at], entry);
    });
  }
  return [...byStep.entries()].sort((a, b) => a[0] - b[0]).map(([step, { values, seconds }]) => ({
    step, seconds: mean(seconds), value: mean(values), low: Math.min(...values), high: Math.max(...values), count: values.length,
  }));
}

function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

function elapsedSeconds(run) {
  let total = 0;
  return run.steps.map((_, index) => {
    const own = run.columns["time/elapsed_seconds"]?.[index];
    const step = run.columns["time/step_seconds"]?.[index];
    total += isNumber(step) ? step * run.stride : 0;
    return isNumber(own) ? own : total;
  });
}

// Mean of each point and those before it, so that a curve never knows its future.
function smoothed(points, width) {
  if (width <= 1) return points;
  return points.map((point, index) => {
    const window = points.slice(Math.max(0, index - width + 1), index + 1);
    const over = (key) => mean(window.map((p) => p[key]));
    return { ...point, value: over("value"), low: over("low"), high: over("high") };
  });
}

// -- axes --------------------------------------------------------------------------------------

function niceTicks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const steps = [1, 2, 2.5, 5, 10].map((m) => m * power);
  const step = steps.reduce((a, b) => (Math.abs(Math.log(b / rough)) < Math.abs(Math.log(a / rough)) ? b : a));
  const ticks = [];
  for (let tick = Math.ceil(low / step - 1e-9) * step; tick <= high + step * 1e-9; tick += step) ticks.push(Math.abs(tick) < step * 1e-9 ? 0 : tick);
  return ticks;
}

function linearScale(values, size) {
  let low = Math.min(...values), high = Math.max(...values);
  if (low === 0 && high === 0) high = 1;
  if (low === high) { const pad = Math.abs(low) * 0.1; low -= pad; high += pad; }
  const pad = (high - low) * 0.06;
  // A curve that never goes below zero gets an axis that does not either.
  const bottom = low >= 0 && low - pad < 0 ? 0 : low - pad;
  const top = high + pad;
  return {
    place: (value) => size - ((value - bottom) / (top - bottom)) * size,
    ticks: niceTicks(bottom, top, Math.max(2, size / 36)).map((value) => ({ value, label: tickLabel(value) })),
  };
}

function tickLabel(value) {
  const size = Math.abs(value);
  if (size >= 10000) return `${Number((value / 1000).toPrecision(4))}k`;
  if (size > 0 && size < 1e-3) return value.toExponential(0);
  return String(Number(value.toPrecision(6)));
}

// Zero has no place on a log axis: it gets the bottom line to itself, labelled 0.
function logScale(values, size) {
  const positive = values.filter((value) => value > 0);
  const hasZero = values.some((value) => value === 0);
  const top = positive.length ? Math.ceil(Math.log10(Math.max(...positive)) + 1e-9) : 0;
  let bottom = positive.length ? Math.floor(Math.log10(Math.min(...positive)) - 1e-9) : -1;
  if (hasZero) bottom -= 1;
  const span = top - bottom;
  const place = (value) => (value > 0 ? size - Math.max(0, (Math.log10(value) - bottom) / span) * size : size);
  const every = Math.max(1, Math.ceil(span / Math.max(2, Math.floor(size / 26))));
  const ticks = [];
  for (let power = top; power >= bottom + (hasZero ? 1 : 0); power -= every) ticks.push({ value: 10 ** power, label: power === 0 ? "1" : `1e${power}` });
  if (hasZero) ticks.push({ value: 0, label: "0" });
  return { place, ticks };
}

// -- a chart -----------------------------------------------------------------------------------

class Chart {
  constructor(spec) {
    this.spec = spec;
    this.active = new Set(isComparison ? [0] : spec.series.map((_, index) => index));
    if (!isComparison && spec.series.length > 5) this.active = new Set([0, 1, 2, 3, 4]);
    this.note = element("p", { class: "chart-note" });
    this.at = element("span", { class: "chart-at" });
    this.svg = svgElement("svg", {
      class: "plot", tabindex: 0, role: "img",
      onpointermove: (event) => this.point(event), onpointerdown: (event) => this.point(event),
      onpointerleave: (event) => { if (event.pointerType === "mouse") setCursor(null); },
      onkeydown: (event) => this.key(event),
    });
    this.legend = element("div", { class: "legend" });
    this.card = element("article", { class: spec.isWide ? "card chart wide" : "card chart" },
      element("header", {}, element("h3", {}, spec.title),
        spec.unit && spec.unit !== "1" ? element("span", { class: "unit" }, spec.unit) : null, this.at),
      isComparison && spec.series.length > 1
        ? choice("Series", spec.series.map((series, index) => ({ value: index, label: series.label, title: series.meaning })), 0,
          (index) => { this.active = new Set([index]); this.draw(); })
        : null,
      this.svg, this.legend, this.note);
    const notes = [];
    if (spec.hasLimits) {
      notes.push(`Dashed: ${report.limits.warning} warning, ${report.limits.critical} critical.`);
      if (this.band()) notes.push("Shaded: the k3 that is normal for this set-up.");
    }
    if (!isComparison && spec.series.length === 1 && spec.series[0].meaning) notes.push(spec.series[0].meaning);
    this.note.textContent = notes.join(" ");
    this.note.hidden = !notes.length;
  }

  band() {
    const bands = new Set(report.runs.map((run) => JSON.stringify(run.mismatch_band)));
    return this.spec.hasLimits && bands.size === 1 ? report.runs[0].mismatch_band : null;
  }

  // The visible curves: [{label, colour, points, raw}].
  curves() {
    const width = this.spec.isLog || this.spec.hasPoints ? 1 : view.smooth;
    const out = [];
    report.groups.forEach((group, groupIndex) => {
      this.spec.series.forEach((series, seriesIndex) => {
        if (!this.active.has(seriesIndex) || view.hiddenGroups.has(groupIndex)) return;
        const raw = groupCurve(group, series);
        if (!raw.length) return;
        out.push({
          key: isComparison ? groupIndex : seriesIndex, label: isComparison ? group.label : series.label,
          colour: colour(isComparison ? groupIndex : seriesIndex), raw, points: smoothed(raw, width),
        });
      });
    });
    return out;
  }

  draw() {
    const width = this.svg.clientWidth || 400, height = this.svg.clientHeight || 220;
    const margin = { left: 50, right: 14, top: 10, bottom: 22 };
    const inner = { width: width - margin.left - margin.right, height: height - margin.top - margin.bottom };
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const drawn = this.drawn = this.curves();
    const everything = drawn.flatMap((curve) => curve.points);
    const hasBand = drawn.some((curve) => curve.points.some((p) => p.count > 1));
    const isFaint = !isComparison && drawn.length <= 2 && view.smooth > 1 && !this.spec.isLog && !this.spec.hasPoints;
    const range = drawn.flatMap((curve) => [
      ...curve.points.flatMap((p) => [p.low, p.high]), ...(isFaint && !hasBand ? curve.raw.map((p) => p.value) : [])]);
    if (this.spec.hasLimits) range.push(report.limits.warning, report.limits.critical);
    const scale = (this.spec.isLog ? logScale : linearScale)(range.length ? range : [0, 1], inner.height);
    const xs = everything.map((p) => p[view.axis]);
    const [first, last] = xs.length ? [Math.min(...xs), Math.max(...xs)] : [0, 1];
    const x = this.x = (value) => margin.left + (last > first ? ((value - first) / (last - first)) * inner.width : inner.width / 2);
    const y = (value) => margin.top + scale.place(value);
    const layer = [];

    const band = this.band();
    if (band) {
      const top = y(band[1]), bottom = band[0] > 0 ? y(band[0]) : margin.top + inner.height;
      layer.push(svgElement("rect", { class: "normal", x: margin.left, width: inner.width, y: Math.min(top, bottom), height: Math.max(0, bottom - top) }));
    }
    for (const tick of scale.ticks) {
      layer.push(svgElement("line", { class: "grid", x1: margin.left, x2: margin.left + inner.width, y1: y(tick.value), y2: y(tick.value) }));
      layer.push(svgElement("text", { class: "tick", x: margin.left - 8, y: y(tick.value), dy: "0.32em", "text-anchor": "end" }, tick.label));
    }
    const labelWidth = view.axis === "seconds" ? 78 : 52;
    for (const value of niceTicks(first, last, Math.max(2, Math.floor(inner.width / labelWidth)))) {
      if (view.axis === "step" && !Number.isInteger(value)) continue;
      layer.push(svgElement("text", { class: "tick", x: x(value), y: margin.top + inner.height + 15, "text-anchor": "middle" },
        view.axis === "seconds" ? formatNumber(value) : tickLabel(value)));
    }
    // In the corner below the vertical labels, where no tick can stand.
    layer.push(svgElement("text", { class: "tick", x: margin.left - 12, y: margin.top + inner.height + 15, "text-anchor": "end" }, view.axis === "seconds" ? "sec" : "step"));
    if (this.spec.hasLimits) for (const limit of [report.limits.warning, report.limits.critical]) {
      layer.push(svgElement("line", { class: "limit", x1: margin.left, x2: margin.left + inner.width, y1: y(limit), y2: y(limit) }));
    }
    const line = (points) => points.map((p, index) => `${index ? "L" : "M"}${x(p[view.axis]).toFixed(1)} ${y(p.value).toFixed(1)}`).join("");
    for (const curve of drawn) if (curve.points.some((p) => p.count > 1)) {
      const edge = [...curve.points.map((p) => [p, p.high]), ...curve.points.map((p) => [p, p.low]).reverse()];
      layer.push(svgElement("path", { class: "seeds", style: { fill: curve.colour },
        d: edge.map(([p, value], index) => `${index ? "L" : "M"}${x(p[view.axis]).toFixed(1)} ${y(value).toFixed(1)}`).join("") + "Z" }));
    }
    for (const curve of drawn) {
      if (isFaint && !hasBand) layer.push(svgElement("path", { class: "raw", d: line(curve.raw), style: { stroke: curve.colour } }));
      layer.push(svgElement("path", { class: "curve", d: line(curve.points), style: { stroke: curve.colour } }));
      if (this.spec.hasPoints || curve.points.length === 1) for (const p of curve.points) {
        layer.push(svgElement("circle", { r: 3, cx: x(p[view.axis]), cy: y(p.value), style: { fill: curve.colour } }));
      }
    }
    this.cursorLayer = svgElement("g", { class: "cursor" });
    this.y = y;
    this.frame = { top: margin.top, bottom: margin.top + inner.height };
    this.svg.replaceChildren(...layer, this.cursorLayer);
    const shown = drawn.map((curve) => `${curve.label} ${formatNumber(curve.points.at(-1).value, this.spec.unit)}`);
    this.svg.setAttribute("aria-label", `${this.spec.title}, last values: ${shown.join(", ")}. Arrow keys move the cursor.`);
    this.drawLegend();
    this.moveCursor();
  }

  drawLegend() {
    const chips = (isComparison ? report.groups : this.spec.series).map((entry, index) => {
      const isOn = isComparison ? !view.hiddenGroups.has(index) : this.active.has(index);
      return element("button", {
        type: "button", class: "chip", "aria-pressed": String(isOn), title: entry.meaning ?? "Show or hide",
        onclick: () => {
          const set = isComparison ? view.hiddenGroups : this.active;
          if (set.has(index)) set.delete(index); else set.add(index);
          if (isComparison) drawCharts(); else this.draw();
        },
      }, element("i", { style: { background: colour(index) } }), element("span", { class: "name" }, entry.label), element("b", {}), element("small", {}));
    });
    this.chips = chips;
    this.legend.replaceChildren(...chips);
  }

  // Puts the cursor at the step, and the values there (or the last ones) into the legend.
  moveCursor() {
    const marks = [];
    let where = null;
    for (const chip of this.chips) for (const part of chip.querySelectorAll("b, small")) part.textContent = "";
    for (const curve of this.drawn) {
      const point = view.cursor === null ? curve.points.at(-1) : nearest(curve.points, view.cursor);
      const [value, range] = this.chips[curve.key].querySelectorAll("b, small");
      value.textContent = formatNumber(point.value, this.spec.unit);
      range.textContent = point.count > 1 ? `${formatNumber(point.low, this.spec.unit)}\u2026${formatNumber(point.high, this.spec.unit)}` : "";
      if (view.cursor === null) continue;
      where = where ?? point;
      marks.push(svgElement("circle", { r: 3.5, cx: this.x(point[view.axis]), cy: this.y(point.value), style: { fill: curve.colour } }));
    }
    if (where) {
      const at = this.x(where[view.axis]);
      marks.unshift(svgElement("line", { x1: at, x2: at, y1: this.frame.top, y2: this.frame.bottom }));
    }
    this.cursorLayer.replaceChildren(...marks);
    this.at.textContent = where ? `step ${where.step}` : "";
  }

  point(event) {
    const left = event.clientX - this.svg.getBoundingClientRect().left;
    const points = this.drawn.flatMap((curve) => curve.points);
    if (!points.length) return;
    const closest = points.reduce((a, b) => (Math.abs(this.x(b[view.axis]) - left) < Math.abs(this.x(a[view.axis]) - left) ? b : a));
    setCursor(closest.step);
  }

  key(event) {
    const steps = [...new Set(this.drawn.flatMap((curve) => curve.points.map((p) => p.step)))].sort((a, b) => a - b);
    if (!steps.length) return;
    const at = view.cursor === null ? steps.length - 1 : Math.max(0, steps.findIndex((step) => step >= view.cursor));
    const next = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: steps.length - 1, Escape: null }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    setCursor(next === null ? null : steps[Math.min(steps.length - 1, Math.max(0, next))]);
  }
}

function nearest(points, step) {
  return points.reduce((a, b) => (Math.abs(b.step - step) < Math.abs(a.step - step) ? b : a));
}

let isCursorQueued = false;
function setCursor(step) {
  view.cursor = step;
  if (isCursorQueued) return;
  isCursorQueued = true;
  requestAnimationFrame(() => {
    isCursorQueued = false;
    for (const chart of view.charts) chart.moveCursor();
  });
}

function drawCharts() {
  for (const chart of view.charts) chart.draw();
}

function buildCurves(section) {
  const specs = chartSpecs();
  section.hidden = !specs.length;
  if (!specs.length) return;
  const hasTime = report.runs.some((run) => elapsedSeconds(run).at(-1) > 0);
  const tools = element("div", { class: "tools" },
    element("span", {}, "Smoothing (steps) ", choice("Smoothing", SMOOTHING, view.smooth, (value) => { view.smooth = value; drawCharts(); })),
    hasTime ? element("span", {}, "Against ", choice("Horizontal axis", [{ value: "step", label: "step" }, { value: "seconds", label: "time" }], view.axis,
      (value) => { view.axis = value; drawCharts(); })) : null);
  const repeats = report.groups.filter((group) => group.runs.length > 1);
  section.append(sectionTitle("Curves", tools));
  const hints = [];
  if (repeats.length) hints.push(`Lines are means over seeds (${repeats.map((group) => group.seeds.join(", ")).join("; ")}), bands run from the lowest to the highest.`);
  const strides = report.runs.map((run) => run.stride).filter((stride) => stride > 1);
  if (strides.length) hints.push(`Long runs are thinned: a point is the mean of up to ${Math.max(...strides)} steps.`);
  hints.push("Log scales are never smoothed. Click a name to hide it.");
  section.append(element("p", { class: "hint" }, hints.join(" ")));
  const grid = element("div", { class: "charts" });
  view.charts = specs.map((spec) => new Chart(spec));
  const [level, moving] = [true, false].map((isLevel) => view.charts.filter((chart) => (chart.spec.flat !== null) === isLevel));
  const levelGrid = element("div", { class: "charts" }, level.map((chart) => chart.card));
  section.append(grid, ...(level.length ? [element("details", { class: "level", ontoggle: () => level.forEach((chart) => chart.draw()) },
    element("summary", {}, `${level.length === 1 ? "One chart is" : `${level.length} charts are`} folded away, with the same value at every step: `,
      level.map((chart) => `${chart.spec.title} (${chart.spec.flat})`).join(", "), "."), levelGrid)] : []));
  // Two wide charts side by side; rows of three, and of two at the end where three would leave a hole.
  const wide = moving.filter((chart) => chart.spec.isWide);
  if (wide.length % 2) wide.at(-1).card.classList.add("alone");
  const narrow = moving.filter((chart) => !chart.spec.isWide);
  const numHalves = { 0: 0, 1: 4, 2: 2 }[narrow.length % 3];
  for (const chart of numHalves && narrow.length >= numHalves ? narrow.slice(-numHalves) : []) chart.card.classList.add("half");
  grid.append(...moving.map((chart) => chart.card));
  let width = 0;
  new ResizeObserver(() => {
    if (grid.clientWidth === width) return;
    width = grid.clientWidth;
    requestAnimationFrame(drawCharts); // drawing changes heights, which an observer must not do
  }).observe(grid);
}

