// Puts the page together: what ran, the headline figures, settings.

function buildTop(top) {
  const run = report.runs[0];
  const isSingle = report.runs.length === 1;
  const facts = isSingle ? runFacts(run) : [];
  top.append(
    element("div", { class: "brand" }, element("span", {}, "Lockstep report"), themeButton()),
    element("h1", {}, report.title),
    isSingle
      ? element("dl", { class: "facts" }, facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))))
      : element("div", { class: "table-frame" }, runTable()));
}

function runFacts(run) {
  return [
    ["recipe", run.recipe], ["model", run.model], ["seed", run.seed], ["steps", run.num_steps],
    ["duration", isNumber(run.seconds) && run.seconds > 0 ? formatSeconds(run.seconds) : ""],
    ["started", formatDate(run.started_at)], ["host", [run.host, run.device || run.cpu].filter(Boolean).join(", ")],
    ["weights", run.sync],
    ["broken on purpose", (run.environment.faults ?? []).map((fault) => fault.type).join(", ")],
    ["resumed", run.num_resumes ? `${run.num_resumes} times` : ""],
  ].filter(([, value]) => value !== "" && value !== null && value !== undefined).map(([name, value]) => [name, String(value)]);
}

function runTable() {
  const names = ["recipe", "model", "seed", "steps", "duration", "started", "host"];
  return element("table", { class: "runs" },
    element("thead", {}, element("tr", {}, element("th", {}, "run"), names.map((name) => element("th", {}, name)))),
    element("tbody", {}, report.runs.map((run) => {
      const facts = Object.fromEntries(runFacts(run));
      return element("tr", {}, element("th", {}, groupDot(run.group), run.name), names.map((name) => element("td", {}, facts[name] ?? "\u2013")));
    })));
}

function groupDot(group) {
  return isComparison ? element("i", { class: "dot", style: { background: colour(group) } }) : null;
}

function buildSections(nav) {
  const names = [["curves", "Curves"], ["settings", "Settings"], ["trajectories", "Trajectories"]];
  nav.replaceChildren(...names.filter(([id]) => !document.getElementById(id).hidden).map(([id, text]) => element("a", { href: `#${id}` }, text)));
}

function buildHeadlines(section) {
  if (!report.headlines.length) section.append(element("p", { class: "hint" }, "No step has been trained yet."));
  if (isComparison) section.append(element("div", { class: "group-key" }, report.groups.map((group, index) =>
    element("span", {}, groupDot(index), group.label,
      group.runs.length > 1 ? element("small", {}, ` ${group.runs.length} seeds`) : null))));
  section.append(element("div", { class: "tiles" }, report.headlines.map((tile) => element("article", { class: "card tile" },
    element("header", {}, element("h3", {}, tile.title)),
    tile.values.map((value, index) => element("div", { class: isComparison ? "figure small" : "figure" },
      groupDot(index),
      element("b", {}, formatNumber(value.value, tile.unit)),
      element("span", {}, [
        isNumber(value.value) ? unitToShow(tile.unit) : "",
        isNumber(value.start) ? `from ${formatNumber(value.start, tile.unit)}` : "",
      ].filter(Boolean).join(" ")),
      value.level ? element("span", { class: `badge ${value.level}` }, LEVELS[value.level]) : null,
      isNumber(value.low) && formatNumber(value.low, tile.unit) !== formatNumber(value.high, tile.unit) ? element("span", { class: "range" }, `seeds ${formatNumber(value.low, tile.unit)} \u2026 ${formatNumber(value.high, tile.unit)}`) : null)),
    element("p", {}, tile.meaning)))));
  const alarms = report.runs.flatMap((run) => [
    ...(["ok", "unmeasured"].includes(run.alarm.level) ? [] : [{ ...run.alarm, badge: LEVELS[run.alarm.level], run }]),
    ...run.health.map((each) => ({ ...each, badge: each.level === "ok" ? "over" : "health", run }))]);
  if (alarms.length) section.append(element("ul", { class: "alarms" }, alarms.map((alarm) =>
    element("li", { class: alarm.level }, element("span", { class: `badge ${alarm.level}` }, alarm.badge),
      report.runs.length > 1 ? element("b", {}, `${alarm.run.name}: `) : null, alarm.text))));
}

function buildSettings(section) {
  const differences = report.config_differences;
  section.append(sectionTitle("Settings"));
  if (report.runs.length > 1) {
    section.append(differences.length
      ? element("div", { class: "table-frame card" }, element("table", { class: "settings" },
        element("thead", {}, element("tr", {}, element("th", {}, "setting that differs"), report.runs.map((run) => element("th", {}, groupDot(run.group), run.name)))),
        element("tbody", {}, differences.map((difference) => element("tr", {}, element("th", {}, element("code", {}, difference.key)),
          difference.values.map((value) => element("td", {}, element("code", {}, formatSetting(value)))))))))
      : element("p", { class: "hint" }, "All runs have the same settings."));
  }
  for (const run of report.runs.filter((each) => each.changed)) {
    const whose = report.runs.length > 1 ? `${run.name}: ` : "";
    section.append(run.changed.length
      ? element("div", { class: "table-frame card" }, element("table", { class: "settings" },
        element("caption", {}, `${whose || "S"}${whose ? "s" : ""}ettings that differ from the recipe`),
        element("thead", {}, element("tr", {}, ["setting", "this run", "recipe"].map((name) => element("th", { scope: "col" }, name)))),
        element("tbody", {}, run.changed.map((change) => element("tr", {}, element("th", { scope: "row" }, element("code", {}, change.key)),
          element("td", { class: "changed" }, element("code", {}, formatSetting(change.values[0]))),
          element("td", {}, element("code", {}, formatSetting(change.values[1]))))))))
      : element("p", { class: "hint" }, `${whose}${whose ? "e" : "E"}very setting is the recipe's.`));
  }
  for (const run of report.runs) {
    section.append(element("details", { class: "card" }, element("summary", {}, report.runs.length > 1 ? `All settings of ${run.name}` : "All settings"),
      element("pre", {}, JSON.stringify(run.config, null, 2)),
      element("h4", {}, "Environment"), element("pre", {}, JSON.stringify(run.environment, null, 2))));
  }
}

buildTop(document.getElementById("top"));
buildHeadlines(document.getElementById("headlines"));
buildCurves(document.getElementById("curves"));
buildSettings(document.getElementById("settings"));
prepareTrajectories();
buildBrowser(document.getElementById("trajectories"));
buildSections(document.getElementById("sections"));
document.getElementById("foot").textContent = `Written ${formatDate(report.generated_at)}. The .json file beside it has every figure of this page.`;
