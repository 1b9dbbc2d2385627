// The browser of trajectories: a list to filter and sort, and one trajectory as messages or tokens.

const DIFFERENCE_NOISE = 1e-5; // float noise: below it a token is not coloured
const DIFFERENCE_FULL = 1; // a factor of e in probability: full colour from here on
const SORTS = {
  first: { label: "most telling", key: (t) => (t.index === report.first.index ? -1 : t.index) },
  mismatch: { label: "largest mismatch", key: (t) => -(t.maxDifference ?? -1) },
  low: { label: "lowest reward", key: (t) => (isNumber(t.reward) ? t.reward : Infinity) },
  high: { label: "highest reward", key: (t) => (isNumber(t.reward) ? -t.reward : Infinity) },
  late: { label: "latest step", key: (t) => -t.step },
  early: { label: "earliest step", key: (t) => t.step },
  long: { label: "most tokens", key: (t) => -t.numTokens },
};

const browser = { shown: [], chosen: null, leaf: null, mode: "messages", rows: new Map(), open: null, add: null, found: {} };
const REPORT_WORDS = { title: "Trajectories", noun: "trajectories", shown: "worst mismatches, best and worst rewards, and a sample" };

function prepareTrajectories() {
  report.trajectories.forEach(prepare);
}

function prepare(t, index) {
  t.index = index;
  t.numTokens = t.segments.reduce((sum, segment) => sum + segment.token_ids.length, 0);
  t.maxDifference = null;
  for (const segment of t.segments) {
    segment.differences = segment.rollout_logprobs && segment.trainer_logprobs
      ? segment.trainer_logprobs.map((value, at) => {
        const other = segment.rollout_logprobs[at];
        return isNumber(value) && isNumber(other) ? value - other : null;
      })
      : null;
    for (const difference of segment.differences ?? []) {
      if (difference !== null) t.maxDifference = Math.max(t.maxDifference ?? 0, Math.abs(difference));
    }
  }
  const parents = new Set(t.segments.map((segment) => segment.parent));
  t.leaves = t.segments.map((_, at) => at).filter((at) => !parents.has(at));
  t.words = [t.id, t.task_id, JSON.stringify(t.task), t.error, ...t.segments.flatMap((segment) => segment.messages).flatMap((message) =>
    [message.name, message.content, message.thinking, ...(message.tool_calls ?? []).flatMap((call) => [call.name, call.arguments])])]
    .filter(Boolean).join("\n").toLowerCase();
}

function pathTo(t, leaf) {
  const path = [];
  for (let at = leaf; at !== null; at = t.segments[at].parent) path.unshift(at);
  return path;
}

// -- the list ----------------------------------------------------------------------------------

function buildBrowser(section, words = REPORT_WORDS) {
  const all = report.trajectories;
  if (!all.length) {
    section.append(sectionTitle(words.title), element("p", { class: "hint" }, `No ${words.noun} are stored.`));
    return;
  }
  const kinds = [...new Set(all.flatMap((t) => t.why))];
  const statuses = [...new Set(all.map((t) => t.status))];
  const option = (value, text) => element("option", { value }, text);
  const sorts = Object.entries(SORTS).filter(([key]) => key !== "first" || report.first);
  const controls = {
    text: element("input", { type: "search", placeholder: "search text, task or id", "aria-label": "Search" }),
    sort: element("select", { "aria-label": "Sort by" }, sorts.map(([key, sort]) => option(key, sort.label))),
    status: element("select", { "aria-label": "Status" }, option("", "any status"), statuses.map((status) => option(status, status))),
    why: element("select", { "aria-label": "Chosen as" }, option("", "all kinds"), kinds.map((kind) => option(kind, kind))),
    reward: element("select", { "aria-label": "Reward" }, option("", "any reward"), option("up", "reward \u2265 median"), option("down", "reward < median")),
    run: element("select", { "aria-label": "Run" }, option("", "all runs"), report.runs.map((run, index) => option(String(index), run.name))),
  };
  const rewards = all.map((t) => t.reward).filter(isNumber).sort((a, b) => a - b);
  const median = rewards[Math.floor(rewards.length / 2)] ?? 0;
  const count = element("span", { class: "count", role: "status" });
  const list = element("div", { class: "list", role: "listbox", tabindex: 0, "aria-label": "Trajectories" });
  const detail = element("div", { class: "detail", tabindex: -1 });
  const refresh = () => {
    const words = controls.text.value.toLowerCase();
    browser.shown = all.filter((t) => (!words || t.words.includes(words) || (browser.found.text === words && browser.found.shown.has(t)))
      && (!controls.status.value || t.status === controls.status.value)
      && (!controls.why.value || t.why.includes(controls.why.value))
      && (!controls.run.value || t.run === Number(controls.run.value))
      && (!controls.reward.value || (isNumber(t.reward) && (t.reward >= median) === (controls.reward.value === "up"))));
    const key = SORTS[controls.sort.value].key;
    browser.shown.sort((a, b) => key(a) - key(b) || a.index - b.index);
    count.textContent = `${browser.shown.length} of ${all.length}`;
    browser.rows = new Map(browser.shown.map((t) => [t, listRow(t)]));
    list.replaceChildren(...browser.rows.values());
    if (!browser.rows.has(browser.chosen)) show(browser.shown[0] ?? null); else mark();
  };
  const mark = () => {
    for (const [t, row] of browser.rows) row.setAttribute("aria-selected", String(t === browser.chosen));
    const row = browser.rows.get(browser.chosen);
    if (row) list.setAttribute("aria-activedescendant", row.id); else list.removeAttribute("aria-activedescendant");
  };
  const show = (t) => {
    browser.chosen = t;
    browser.leaf = t ? (t.rewards.length ? t.rewards[0][0] : t.leaves.at(-1) ?? null) : null;
    mark();
    drawDetail(detail);
  };
  browser.open = (t) => {
    if (!browser.rows.has(t)) { // a filter hides it
      for (const name of ["text", "status", "why", "reward", "run"]) controls[name].value = "";
      refresh();
    }
    show(t);
    browser.rows.get(t).scrollIntoView({ block: "nearest" });
  };
  // Takes in what a search over the whole store found: a page in one file cannot ask for it.
  browser.add = (text, documents, vocabulary) => {
    const known = new Map(all.map((t) => [placeOf(t), t]));
    const shown = documents.map((t) => {
      if (known.has(placeOf(t))) return known.get(placeOf(t));
      prepare(t, all.length);
      all.push(t);
      return t;
    });
    const words = report.vocabularies[0];
    if (words && vocabulary) {
      Object.assign(words.texts, vocabulary.texts);
      words.control_ids = [...new Set([...words.control_ids, ...vocabulary.control_ids])];
      controlSets.clear();
    }
    browser.found = { text: text.toLowerCase(), shown: new Set(shown) };
    refresh();
  };
  const listRow = (t) => element("div", { class: "row", role: "option", id: `t${t.index}`, onclick: () => show(t) },
    element("span", { class: "row-reward" }, formatNumber(t.reward)),
    element("span", { class: "row-main" },
      element("span", { class: "row-title" }, question(t)),
      element("span", { class: "row-facts" },
        isComparison || report.runs.length > 1 ? element("i", { class: "dot", title: report.runs[t.run].name, style: { background: colour(isComparison ? report.runs[t.run].group : t.run) } }) : null,
        t.status === "finished" ? null : element("b", { class: `status ${t.status}` }, t.status, " \u00b7 "),
        t.step === null ? null : `step ${t.step} \u00b7 `, t.split === "train" ? null : `${t.split} \u00b7 `, `${t.numTokens} tokens`,
        t.maxDifference === null ? null : ` \u00b7 \u0394 ${formatNumber(t.maxDifference)}`)));
  list.addEventListener("keydown", (event) => {
    const at = browser.shown.indexOf(browser.chosen);
    const next = { ArrowDown: at + 1, j: at + 1, ArrowUp: at - 1, k: at - 1, PageDown: at + 8, PageUp: at - 8, Home: 0, End: browser.shown.length - 1 }[event.key];
    if (event.key === "Enter") { event.preventDefault(); detail.focus(); return; }
    if (next === undefined || event.ctrlKey || event.metaKey || !browser.shown.length) return;
    event.preventDefault();
    show(browser.shown[Math.min(browser.shown.length - 1, Math.max(0, next))]);
    browser.rows.get(browser.chosen).scrollIntoView({ block: "nearest" });
  });
  for (const control of Object.values(controls)) control.addEventListener("input", refresh);
  const left = report.num_left_out_for_size ? `, ${report.num_left_out_for_size} left out as too long` : "";
  section.append(
    sectionTitle(words.title, element("span", { class: "hint" },
      `${all.length} shown of ${report.num_stored_trajectories.toLocaleString("en-US")} stored: ${words.shown}${left}.`,
      report.first && !report.live && all.length < report.num_stored_trajectories ? " Search covers the shown ones; lockstep report RUN --serve searches all." : "")),
    ...(report.damaged ?? []).map((problem) => element("p", { class: "hint", role: "alert" }, problem)),
    element("div", { class: "filters" }, controls.text, controls.sort, controls.why,
      statuses.length > 1 ? controls.status : null, rewards.length > 1 ? controls.reward : null,
      report.runs.length > 1 ? controls.run : null, count),
    element("div", { class: "browser card" }, list, detail));
  refresh();
}

function placeOf(t) {
  return JSON.stringify([t.split, t.step, t.id]);
}

// The first thing that was asked, in one line.
function question(t) {
  for (const segment of t.segments) {
    for (const message of segment.messages) if (message.role === "user") return message.content.trim().replace(/\s+/g, " ") || t.task_id;
  }
  return t.task_id || t.id;
}

// -- one trajectory ----------------------------------------------------------------------------

function drawDetail(detail) {
  const t = browser.chosen;
  hideTip();
  if (!t) { detail.replaceChildren(element("p", { class: "hint" }, "Nothing matches the filter.")); return; }
  const body = element("div", { class: "body" });
  const draw = () => {
    hideTip();
    body.replaceChildren(...(browser.mode === "messages" ? messagesOf(t) : tokensOf(t)));
  };
  const hasDifferences = t.segments.some((segment) => segment.differences);
  const modes = [
    { value: "messages", label: "Messages" },
    { value: "origin", label: "Tokens: sampled or observed" },
    ...(hasDifferences ? [{ value: "difference", label: "Tokens: trainer \u2212 rollout" }] : []),
  ];
  if (!modes.some((mode) => mode.value === browser.mode)) browser.mode = "origin";
  const facts = [
    ["step", t.step], ["run", report.runs.length > 1 ? report.runs[t.run].name : null], ["split", t.split === "train" ? null : t.split],
    ["task", t.task_id || null], ["id", t.id],
    ["largest |\u0394 log-prob|", t.maxDifference === null ? "not compared" : formatNumber(t.maxDifference)],
    ["first over 0.1", typeof t.first_divergence === "number" ? `token ${t.first_divergence}` : null], ["shown are", t.cut || null],
    ["advantage", leafAdvantage(t)], ["shown as", t.why.join(", ")],
  ].filter(([, value]) => value !== null && value !== "");
  detail.replaceChildren(
    element("header", {},
      element("div", { class: "score" }, element("b", {}, formatNumber(t.reward)), element("span", {}, "reward")),
      element("div", { class: "parts" },
        Object.entries(t.parts).map(([name, value]) => element("span", { class: "part" }, `${name.replaceAll("_", " ")} `, element("b", {}, formatNumber(value)))),
        t.status === "finished" ? null : element("span", { class: `badge ${t.status}` }, t.status))),
    element("dl", { class: "facts" }, facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, String(value))))),
    ...(report.first?.index === t.index ? [element("p", { class: "hint" }, `Shown first: ${report.first.why}.`)] : []),
    ...(t.error ? [element("p", { class: "error" }, t.error)] : []),
    ...(t.reference ? [answers(t)] : []),
    ...(t.leaves.length > 1 ? [branchPicker(t, draw)] : []),
    ...(t.evidence ?? []).map((piece) => evidenceCard(t, piece)),
    choice("View", modes, browser.mode, (mode) => { browser.mode = mode; draw(); }),
    body,
    element("details", { class: "task" }, element("summary", {}, "Task and counters"),
      element("pre", {}, JSON.stringify({ task: t.task, counters: t.metrics }, null, 2))));
  draw();
}

// The expected answer beside the last reply of the branch.
function answers(t) {
  const replies = pathTo(t, browser.leaf).flatMap((at) => (t.segments[at].is_sampled ? t.segments[at].messages : []));
  const reply = replies.at(-1)?.content.trim();
  return element("dl", { class: "answers" },
    element("div", {}, element("dt", {}, "expected answer"), element("dd", {}, t.reference)),
    element("div", {}, element("dt", {}, "reply"), element("dd", {}, reply || "(no text)")));
}

function leafAdvantage(t) {
  const values = t.segments[t.leaves.at(-1)]?.advantages?.filter(isNumber) ?? [];
  return values.length ? formatNumber(mean(values)) : null;
}

function branchPicker(t, draw) {
  const rewards = new Map(t.rewards);
  const options = t.leaves.map((leaf, index) => {
    const branch = pathTo(t, leaf).map((at) => t.segments[at].reason).filter(Boolean).at(-1);
    const reward = rewards.has(leaf) ? ` \u00b7 ${formatNumber(rewards.get(leaf))}` : "";
    return { value: leaf, label: `branch ${index + 1}${branch ? ` (${branch})` : ""}${reward}` };
  });
  return choice("Branch", options, browser.leaf, (leaf) => {
    browser.leaf = leaf;
    document.querySelector(".answers")?.replaceWith(answers(t));
    draw();
  });
}

function messagesOf(t) {
  const out = [];
  for (const at of pathTo(t, browser.leaf)) {
    const segment = t.segments[at];
    if (segment.reason) out.push(element("p", { class: "branch-mark" }, `branch: ${segment.reason}`));
    for (const message of segment.messages) out.push(messageCard(message, segment));
    if (!segment.messages.length) out.push(segmentCard(t, at));
  }
  return out;
}

function messageCard(message, segment) {
  const differences = segment.differences?.filter((value) => value !== null).map(Math.abs) ?? [];
  return element("article", { class: `message ${message.role}${segment.is_sampled ? " sampled" : ""}` },
    element("header", {}, element("b", {}, message.name ? `${message.role}: ${message.name}` : message.role),
      element("span", {}, segment.is_sampled ? `sampled, ${segment.token_ids.length} tokens` : ""),
      element("span", {}, differences.length ? `\u0394 up to ${formatNumber(Math.max(...differences))}` : "")),
    message.thinking ? element("div", { class: "thinking" }, message.thinking) : null,
    message.content ? element("div", { class: "content" }, message.content) : null,
    (message.tool_calls ?? []).map((call) => element("div", { class: "call" }, element("b", {}, call.name), element("code", {}, call.arguments))),
    message.parse_error ? element("p", { class: "error" }, `not well-formed: ${message.parse_error}`) : null);
}

// -- tokens ------------------------------------------------------------------------------------

function tokensOf(t) {
  const hasText = Boolean(report.vocabularies[t.run]);
  return [
    browser.mode === "difference" ? differenceLegend() : originLegend(hasText),
    ...pathTo(t, browser.leaf).map((at) => segmentCard(t, at)),
  ];
}

function originLegend(hasText) {
  return element("div", { class: "token-legend" },
    element("span", { class: "token sampled" }, "sampled"), "by the policy",
    element("span", { class: "token observed" }, "observed"), "prompt or tool",
    hasText ? element("span", { class: "token observed control" }, "control") : null, hasText ? "protocol token" : null);
}

function differenceLegend() {
  const stops = [-1, -0.1, -1e-2, -1e-3, -1e-4, 0, 1e-4, 1e-3, 1e-2, 0.1, 1];
  return element("div", { class: "token-legend" },
    "trainer less likely",
    element("span", { class: "ramp" }, stops.map((value) => {
      const swatch = element("span", { class: "token sampled ramped" }, value === 0 ? "noise" : `${value > 0 ? "+" : "\u2212"}${tickLabel(Math.abs(value))}`);
      paintDifference(swatch, value);
      return swatch;
    })),
    "trainer more likely", element("span", { class: "hint" }, "log-prob, trainer \u2212 rollout; log scale"));
}

// Blue below, orange above, on a log scale from noise to a factor of e.
function paintDifference(node, difference) {
  node.classList.add("painted");
  if (difference === null) return;
  const size = Math.abs(difference);
  if (size < DIFFERENCE_NOISE) return;
  const share = Math.min(1, Math.log10(size / DIFFERENCE_NOISE) / Math.log10(DIFFERENCE_FULL / DIFFERENCE_NOISE));
  node.style.setProperty("--strength", `${Math.round(12 + 88 * share)}%`);
  node.classList.add(difference < 0 ? "lower" : "higher");
  if (share > 0.7) node.classList.add("strong");
}

function segmentCard(t, at) {
  const segment = t.segments[at];
  const facts = [
    segment.is_sampled ? "sampled" : "observed",
    segment.is_sampled ? `turn ${segment.turn + 1}` : null,
    `${segment.token_ids.length} tokens`,
    segment.policy_version === null ? null : `policy ${segment.policy_version}`,
    segment.finish_reason && segment.finish_reason !== "stop" ? `ended by ${segment.finish_reason.replaceAll("_", " ")}` : null,
    segment.reason ? `branch: ${segment.reason}` : null,
    segment.reward === null ? null : `own reward ${formatNumber(segment.reward)}`,
    segment.is_sampled && !(segment.is_trained ?? (t.split !== "train" || segment.advantages)) ? "not trained" : null,
    !segment.is_sampled && segment.is_trained ? "trained" : null,
    segment.importance_weights ? rejectedText(segment) : null,
    segment.advantages && !segment.trainer_logprobs ? "trainer log-probs not recorded" : null,
  ].filter(Boolean);
  const strip = element("div", { class: "tokens" });
  segment.token_ids.forEach((id, place) => strip.append(tokenNode(t, segment, id, place)));
  strip.addEventListener("pointerover", (event) => { if (event.target.token) showTip(event.target); });
  strip.addEventListener("pointerleave", hideTip);
  strip.addEventListener("focusin", (event) => { if (event.target.token) showTip(event.target); });
  strip.addEventListener("focusout", hideTip);
  strip.addEventListener("keydown", (event) => {
    const next = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
    const to = next && event.target[next];
    if (to) { event.preventDefault(); event.target.tabIndex = -1; to.tabIndex = 0; to.focus(); }
  });
  if (strip.firstElementChild) strip.firstElementChild.tabIndex = 0;
  return element("article", { class: `segment${segment.is_sampled ? " sampled" : ""}` }, element("header", {}, facts.join(" \u00b7 ")), strip);
}

// A correction leaves a token out by a weight of exactly 0.
function isRejected(segment, place) {
  return segment.importance_weights?.[place] === 0;
}

function rejectedText(segment) {
  const count = segment.importance_weights.filter((weight) => weight === 0).length;
  return count ? `${count} rejected by the correction` : null;
}

function tokenNode(t, segment, id, place) {
  const words = report.vocabularies[t.run];
  const isControl = Boolean(words) && controlIds(t.run).has(id);
  const text = words ? words.texts[id] : String(id);
  const node = element("span", { class: `token ${segment.is_sampled ? "sampled" : "observed"}${isControl ? " control" : ""}${words ? "" : " bare"}`, tabindex: -1 },
    visible(text, isControl));
  if (isRejected(segment, place)) node.classList.add("rejected");
  if (browser.mode === "difference") paintDifference(node, segment.differences?.[place] ?? null);
  if (segment.begin !== undefined) {
    const at = segment.begin + place;
    if (t.evidence.some((piece) => at >= piece.begin && at < piece.end)) node.classList.add("marked");
    if (at === t.first_divergence) node.classList.add("diverges");
  }
  node.token = { text, id, place, segment };
  return node;
}

const controlSets = new Map();
function controlIds(run) {
  if (!controlSets.has(run)) controlSets.set(run, new Set(report.vocabularies[run].control_ids));
  return controlSets.get(run);
}

// A newline is shown and taken; an empty or blank token keeps a width.
function visible(text, isControl) {
  if (isControl) return text;
  if (text === "") return "\u2205";
  return text.replaceAll("\n", "\u21b5\n").replaceAll("\t", "\u21e5\t");
}

const tip = document.getElementById("tip");

function showTip(node) {
  const { text, id, place, segment } = node.token;
  const rollout = segment.rollout_logprobs?.[place], trainer = segment.trainer_logprobs?.[place];
  const difference = segment.differences?.[place];
  const line = (name, value) => element("div", {}, element("dt", {}, name), element("dd", {}, value));
  const exact = (value) => (isNumber(value) ? `${value.toPrecision(6)} (p ${formatNumber(Math.exp(value))})` : String(value ?? "\u2013"));
  tip.replaceChildren(element("code", {}, JSON.stringify(text)), element("dl", {},
    line("id", String(id)), line("position", `${place + 1} of ${segment.token_ids.length} in its segment`),
    ...(segment.begin === undefined ? [] : [line("place in the row", String(segment.begin + place))]),
    ...(segment.is_sampled ? [
      line("rollout log-prob", exact(rollout)), line("trainer log-prob", exact(trainer)),
      line("trainer \u2212 rollout", difference === null || difference === undefined ? "\u2013" : difference.toExponential(2)),
      line("advantage", formatNumber(segment.advantages?.[place])),
      ...(segment.importance_weights ? [line("weight", isRejected(segment, place) ? "rejected" : formatNumber(segment.importance_weights[place]))] : [])] : [line("origin", "observed: never trained")])));
  tip.hidden = false;
  const at = node.getBoundingClientRect(), size = tip.getBoundingClientRect();
  const left = Math.min(Math.max(8, at.left), document.documentElement.clientWidth - size.width - 8);
  const isBelow = at.bottom + size.height + 8 < window.innerHeight;
  tip.style.left = `${left}px`;
  tip.style.top = `${isBelow ? at.bottom + 6 : Math.max(8, at.top - size.height - 6)}px`;
}

function hideTip() {
  tip.hidden = true;
}

window.addEventListener("scroll", hideTip, { passive: true });
window.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });

