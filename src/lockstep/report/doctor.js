// Puts the doctor's page together: the verdict, the causes with their proof, where the gap is, every
// check, and the rows.

const diagnosis = report.diagnosis;
const OUTCOMES = { consistent: "consistent", differs: "differs", not_judged: "not judged" };
const VERDICTS = { differs: "differs", consistent: "ruled out", not_checkable: "not checked" };

function range([least, most]) {
  return most - least >= 0.1 ? ` (${percent(least)} to ${percent(most)})` : "";
}

function percent(share) {
  return isNumber(share) ? `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %` : "\u2013";
}

function nats(value) {
  return isNumber(value) ? (value === 0 ? "0" : Math.abs(value) < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(3)))) : String(value);
}

function factList(facts) {
  return element("dl", { class: "facts" }, facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

function buildTop(top) {
  const gap = diagnosis.gap, compared = gap.compared_tokens;
  top.append(
    element("div", { class: "brand" }, element("span", {}, "Lockstep doctor"), themeButton()),
    element("h1", {}, report.title),
    element("div", { class: "verdict" }, element("span", { class: `badge ${diagnosis.outcome}` }, OUTCOMES[diagnosis.outcome]),
      element("span", {}, verdictText())),
    factList([
      ["input", diagnosis.input], ["format", diagnosis.format], ...(diagnosis.trainer ? [["trainer", diagnosis.trainer]] : []),
      ["rows", diagnosis.rows.toLocaleString("en-US")], ["tokens", diagnosis.tokens.toLocaleString("en-US")],
      ["compared", compared.toLocaleString("en-US")],
      ...(compared ? [["k1", nats(gap.k1)], ["k2", nats(gap.k2)], ["k3", nats(gap.k3)], ["largest |d|", nats(gap.max_abs_diff)]] : []),
      ...diagnosis.notes.map((note) => ["note", note]),
    ]));
}

function verdictText() {
  const causes = diagnosis.causes;
  if (diagnosis.headline) return `${diagnosis.headline}.`;
  const before = Object.keys(diagnosis.found_while_training);
  if (!causes.length && before.length) return `While it trained, ${before.join(", ")} ${before.length === 1 ? "was" : "were"} found in the rows as they were trained; these rows are the sampled ones.`;
  if (!causes.length) return `${diagnosis.ruled_out.length} facts and hypotheses were tried; nothing was found.`;
  const share = causes.reduce((sum, cause) => sum + cause.share_k2, 0);
  return `${causes.length === 1 ? "One cause" : `${causes.length} causes`} found${share > 0 ? `; without ${causes.length === 1 ? "it" : "them"} ${percent(share)} of k2 is gone` : ""}.`;
}

// -- causes and their proof --------------------------------------------------------------------

function buildCauses(section) {
  if (!diagnosis.causes.length && !diagnosis.gap.compared_tokens) { section.remove(); return; }
  if (diagnosis.causes.length) section.append(sectionTitle("Causes", element("span", { class: "hint" }, "The largest share of the gap first.")));
  section.append(element("div", { class: "causes" }, diagnosis.causes.map((cause, index) => {
    const finding = diagnosis.findings.find((f) => f.check === cause.check && f.cause === cause.cause);
    return element("article", { class: "card cause" },
      element("header", {}, element("h3", {}, `${index + 1}. ${cause.cause}`),
        element("span", { class: `badge ${cause.certainty}` }, cause.certainty),
        element("span", { class: "share" }, cause.share_k2 >= 0.001 ? `${percent(cause.share_k2)} of k2${range(cause.share_k2_range)}` : "moves few log-probs, or none")),
      cause.share_k2 >= 0.001 ? element("div", { class: "bar" }, element("i", { style: { width: `${Math.min(100, 100 * cause.share_k2)}%` } })) : null,
      element("p", {}, cause.title),
      element("dl", {}, [["measured", cause.measured], ["sure", cause.why]].map(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]).flat(),
        element("dt", {}, "remedy"), element("dd", { class: "remedy" }, cause.remedy),
        Object.entries(cause.in_engines).map(([name, text]) => [element("dt", {}, `in ${name}`), element("dd", { class: "remedy" }, text)]).flat(),
        element("dt", {}, "again"), element("dd", {}, element("code", { class: "command" }, cause.command))),
      element("div", { class: "proofs" }, finding.evidence.slice(0, 2).map((piece) => proof(piece))));
  })));
  if (!diagnosis.gap.compared_tokens) return;
  const left = diagnosis.unexplained, places = left.mostly_in;
  if (left.is_float_noise) {
    section.append(element("p", { class: "card left" }, element("b", {}, "The gap: "), `both sides agree to float noise (k2 ${nats(left.gap.k2)}, largest |d| ${nats(left.gap.max_abs_diff)}).`));
    return;
  }
  section.append(element("p", { class: "card left" },
    element("b", {}, diagnosis.causes.length ? `Unexplained: ${percent(Math.max(0, left.k2_share))} of k2. ` : "The gap: "),
    `k2 ${nats(left.gap.k2)}, largest |d| ${nats(left.gap.max_abs_diff)}`,
    places.length
      ? `; ${places.map((p) => `${percent(p.share_k2)} of it in ${p.part} ${p.label} (${percent(p.share_tokens)} of the tokens)`).join("; ")}.`
      : left.gap.max_abs_diff < 1e-4 ? "; float noise." : "; spread over turns, positions and kinds of token."));
}

function rowNamed(name) {
  return report.trajectories.find((t) => t.id === name);
}

function proof(piece) {
  const t = rowNamed(piece.row);
  const title = element("p", {}, t
    ? element("button", { type: "button", onclick: () => openRow(t) }, piece.row) : piece.row,
  `, ${places(piece)}: ${piece.note}`);
  if (!t) return element("div", { class: "proof" }, title);
  if (piece.expected_ids.length) return element("div", { class: "proof" }, title, sideBySide(tokensBetween(t, piece.begin, piece.end), piece));
  const beside = Math.max(0, Math.ceil((8 - (piece.end - piece.begin)) / 2)); // few tokens are shown among their neighbours
  return element("div", { class: "proof" }, title, logprobTable(tokensBetween(t, piece.begin - beside, piece.end + beside)));
}

function logprobTable(tokens, limit = 8) {
  const sizes = tokens.map((token) => (token.difference === null ? -1 : Math.abs(token.difference)));
  const worst = sizes.indexOf(Math.max(...sizes));
  const first = Math.max(0, Math.min(worst - limit / 2, tokens.length - limit));
  const number = (value) => (isNumber(value) ? value.toFixed(4) : "\u2013");
  return element("div", { class: "table-frame" }, element("table", { class: "proof-table" },
    element("thead", {}, element("tr", {}, ["place", "token", "rollout", "trainer", "trainer \u2212 rollout"].map((name) => element("th", {}, name)))),
    element("tbody", {}, tokens.slice(first, first + limit).map((token) => element("tr", {},
      element("td", {}, String(token.place)), element("td", { class: "tokens" }, plainToken(token.id), element("small", {}, ` ${token.id}`)),
      element("td", {}, number(token.rollout)), element("td", {}, number(token.trainer)),
      element("td", { class: Math.abs(token.difference ?? 0) > 0.1 ? "large" : null }, token.difference === null ? "\u2013" : token.difference.toExponential(2)))))));
}

function openRow(t) {
  document.getElementById("trajectories").scrollIntoView();
  browser.open(t);
}

// -- every check -------------------------------------------------------------------------------

function buildChecks(section) {
  const order = Object.keys(VERDICTS);
  const findings = [...diagnosis.findings].sort((a, b) => order.indexOf(a.verdict) - order.indexOf(b.verdict));
  const shares = new Map(diagnosis.causes.map((cause) => [`${cause.check} ${cause.cause}`, cause]));
  section.append(sectionTitle("Facts and hypotheses", element("span", { class: "hint" }, "What was tried and explains nothing is ruled out.")),
    element("div", { class: "table-frame card" }, element("table", { class: "checks" },
      element("thead", {}, element("tr", {}, ["verdict", "name", "measured", "share of k2", "remedy, or what it takes"].map((name) => element("th", {}, name)))),
      element("tbody", {}, findings.map((finding) => {
        const cause = shares.get(`${finding.check} ${finding.cause}`), missing = diagnosis.not_checkable[finding.check];
        return element("tr", {},
          element("td", {}, element("span", { class: `badge ${finding.verdict}` }, VERDICTS[finding.verdict])),
          element("td", {}, element("code", {}, finding.check), element("span", { class: "claim" }, finding.claim)),
          element("td", {}, missing?.length ? null : finding.measured),
          element("td", {}, cause ? percent(cause.share_k2) : null),
          element("td", {}, cause ? [cause.remedy, element("br"), element("code", { class: "command" }, cause.command)] : missing ? missing.join("; ") : null));
      })))));
}

// -- where the gap is --------------------------------------------------------------------------

const PART_TITLES = { turn: "By turn", position: "By place in the row", kind: "By kind of token", spelling: "By spelling", forced: "By forced tokens", age: "By age of the weights" };

function buildPlaces(section) {
  const before = diagnosis.where.before, after = diagnosis.where.after;
  if (!diagnosis.gap.compared_tokens) { section.remove(); return; }
  const isRepaired = diagnosis.causes.some((cause) => cause.share_k2 > 0);
  section.append(sectionTitle("Where the gap is", element("span", { class: "hint" },
    `Mean k2 of the tokens of each sort${isRepaired ? "; blue as it is, green with the causes undone" : ""}. Log scale.`)));
  const grid = element("div", { class: "charts" });
  section.append(grid);
  const bars = [];
  const run = report.runs[0];
  if (before.steps.length > 1) {
    const column = (split, name, change = (v) => v) => split.steps.map((step) => (isNumber(step[name]) ? change(step[name]) : null));
    Object.assign(run, { stride: 1, steps: before.steps.map((step) => step.step), columns: {
      k3: column(before, "k3"), k2: column(before, "k2"), "|k1|": column(before, "k1", Math.abs), ...(isRepaired ? { "k3, causes undone": column(after, "k3") } : {}) } });
    const series = Object.keys(run.columns).map((name) => ({ label: name, values: (r) => r.columns[name] ?? [] }));
    view.charts.push(new Chart({ title: "By step", unit: "nats", isWide: true, isLog: true, hasLimits: true, hasPoints: before.steps.length < 30, series }));
  }
  bars.push(new BarChart({ title: "Size of trainer \u2212 rollout", unit: "tokens", isWide: true, ...histogramBars(before.histogram) }));
  for (const [name, title] of Object.entries(PART_TITLES)) {
    const places = before.parts[name];
    if (!places || places.length < 2) continue;
    const undone = new Map(after.parts[name].map((place) => [place.label, place]));
    bars.push(new BarChart({ title, unit: "nats", isLog: true, groups: places.map((place) => ({
      label: place.label,
      bars: [{ value: place.k2, kind: "before" }, ...(isRepaired ? [{ value: undone.get(place.label)?.k2 ?? null, kind: "after" }] : [])],
      text: `${place.label}: k2 ${nats(place.k2)}, ${percent(place.share_k2)} of the sum, on ${percent(place.share_tokens)} of the tokens`,
    })) }));
  }
  for (const [name, gap] of Object.entries(before.routes)) if (Object.keys(before.routes).length > 1 && name === "differ") {
    bars.push(new BarChart({ title: "By routes of the two sides", unit: "nats", isLog: true, groups: ["same", "differ"].map((label) => ({
      label, bars: [{ value: before.routes[label].k2, kind: "before" }], text: `${label}: ${before.routes[label].compared_tokens} tokens` })) }));
  }
  grid.append(...view.charts.map((chart) => chart.card), ...bars.map((chart) => chart.card));
  const narrow = bars.filter((chart) => !chart.spec.isWide);
  const numHalves = { 0: 0, 1: 4, 2: 2 }[narrow.length % 3];
  for (const chart of numHalves && narrow.length >= numHalves ? narrow.slice(-numHalves) : []) chart.card.classList.add("half");
  if (view.charts.length === 0) bars[0].card.classList.add("full");
  let width = 0;
  new ResizeObserver(() => {
    if (grid.clientWidth === width) return;
    width = grid.clientWidth;
    requestAnimationFrame(() => { drawCharts(); for (const chart of bars) chart.draw(); });
  }).observe(grid);
}

function histogramBars(histogram) {
  const labels = histogram.edges.map((edge) => Math.round(Math.log10(edge) * 2) / 2);
  const used = histogram.below.map((count, at) => count + histogram.above[at] > 0);
  const first = Math.max(0, used.indexOf(true)), last = Math.max(first, used.lastIndexOf(true));
  const name = (at) => (at === 0 ? `below 1e${labels[0]}` : at > labels.length - 1 ? `above 1e${labels.at(-1)}` : `1e${labels[at - 1]} to 1e${labels[at]}`);
  const bin = (side, at, sign) => ({
    label: at > 0 && Number.isInteger(labels[at - 1]) ? `${sign}1e${labels[at - 1]}` : "",
    bars: [{ value: histogram[side][at], kind: side }],
    text: `|d| ${name(at)}, trainer ${side === "below" ? "less" : "more"} likely: ${histogram[side][at].toLocaleString("en-US")} tokens`,
  });
  const places = Array.from({ length: last - first + 1 }, (_, i) => first + i);
  return { isLog: true, isCount: true, groups: [
    ...[...places].reverse().map((at) => bin("below", at, "\u2212")),
    { label: "0", bars: [{ value: histogram.equal, kind: "equal" }], text: `equal to the bit: ${histogram.equal.toLocaleString("en-US")} tokens` },
    ...places.map((at) => bin("above", at, "+"))] };
}

// Bars by label; the value of one is read by pointing at it, or with the arrow keys.
class BarChart {
  constructor(spec) {
    this.spec = spec;
    this.at = element("span", { class: "chart-at" });
    this.chosen = null;
    this.svg = svgElement("svg", { class: "plot", tabindex: 0, role: "img",
      onpointermove: (event) => this.point(event), onpointerdown: (event) => this.point(event),
      onpointerleave: (event) => { if (event.pointerType === "mouse") this.choose(null); },
      onkeydown: (event) => {
        const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (!by) return;
        event.preventDefault();
        this.choose(Math.min(spec.groups.length - 1, Math.max(0, (this.chosen ?? (by > 0 ? -1 : spec.groups.length)) + by)));
      } });
    this.note = element("p", { class: "chart-note", role: "status" }, this.rest());
    this.card = element("article", { class: `card chart${spec.isWide ? " wide" : ""}` },
      element("header", {}, element("h3", {}, spec.title), element("span", { class: "unit" }, spec.unit), this.at), this.svg, this.note);
    this.svg.setAttribute("aria-label", `${spec.title}. ${spec.groups.filter((group) => group.bars.some((bar) => bar.value)).map((group) => group.text).join("; ")}`);
  }

  rest() {
    return this.spec.isCount ? "Left of 0 the trainer finds the token less likely, right of it more." : "";
  }

  choose(index) {
    this.chosen = index;
    this.note.textContent = index === null ? this.rest() : this.spec.groups[index].text;
    this.note.hidden = false;
  }

  point(event) {
    const left = event.clientX - this.svg.getBoundingClientRect().left - 50;
    const index = Math.floor(left / this.step);
    this.choose(index >= 0 && index < this.spec.groups.length ? index : null);
  }

  draw() {
    const width = this.svg.clientWidth || 400, height = this.svg.clientHeight || 220;
    const margin = { left: 50, right: 14, top: 10, bottom: 22 };
    const inner = { width: width - margin.left - margin.right, height: height - margin.top - margin.bottom };
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const values = this.spec.groups.flatMap((group) => group.bars.map((bar) => bar.value)).filter((value) => isNumber(value) && value > 0);
    const scale = logScale(values.length ? [...values, Math.min(...values) / 1.5] : [1], inner.height);
    const step = this.step = inner.width / this.spec.groups.length;
    const layer = [];
    for (const tick of scale.ticks) {
      const y = margin.top + scale.place(tick.value);
      layer.push(svgElement("line", { class: "grid", x1: margin.left, x2: margin.left + inner.width, y1: y, y2: y }),
        svgElement("text", { class: "tick", x: margin.left - 8, y, dy: "0.32em", "text-anchor": "end" }, tick.label));
    }
    let free = -Infinity; // where the last label ended: a label that would overlap it is left out
    this.spec.groups.forEach((group, index) => {
      const left = margin.left + index * step, wide = Math.min(46, step * 0.78) / group.bars.length;
      group.bars.forEach((bar, number) => {
        if (!isNumber(bar.value) || bar.value <= 0) return;
        const y = margin.top + scale.place(bar.value);
        layer.push(svgElement("rect", { class: `bar-${bar.kind}`, x: left + step / 2 + (number - group.bars.length / 2) * wide, y, width: Math.max(1, wide - 1), height: Math.max(1, margin.top + inner.height - y) }));
      });
      const half = group.label.length * 3.3 + 3, centre = left + step / 2;
      if (group.label && centre - half >= free && centre + half <= width) {
        layer.push(svgElement("text", { class: "tick", x: centre, y: margin.top + inner.height + 15, "text-anchor": "middle" }, group.label));
        free = centre + half;
      }
    });
    this.svg.replaceChildren(...layer);
  }
}

function buildSections(nav) {
  const names = [["causes", "Causes"], ["curves", "Where"], ["checks", "Tried"], ["trajectories", "Rows"]];
  nav.append(...names.filter(([id]) => document.getElementById(id)).map(([id, text]) => element("a", { href: `#${id}` }, text)));
}

prepareTrajectories();
buildTop(document.getElementById("top"));
buildCauses(document.getElementById("causes"));
buildPlaces(document.getElementById("curves"));
buildChecks(document.getElementById("checks"));
browser.mode = report.trajectories.some((t) => t.maxDifference !== null) ? "difference" : "origin";
buildBrowser(document.getElementById("trajectories"), { title: "Rows", noun: "rows", shown: "proofs of a cause, the largest gaps, and a sample" });
buildSections(document.getElementById("sections"));
document.getElementById("foot").textContent = `Written ${formatDate(report.generated_at)}. \`lockstep doctor ${diagnosis.input} --json\` prints the same figures.`;
