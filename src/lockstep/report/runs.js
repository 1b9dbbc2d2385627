// The runs that are served, with their state; asks for it again every few seconds.

const POLL_MILLISECONDS = 3000;
const COLUMNS = ["run", "state", "step", "reward", "KL (k3)", "doctor", "started"];

function drawRuns() {
  const section = document.getElementById("runs");
  if (!report.runs.length) {
    section.replaceChildren(element("p", { class: "hint" }, "There is no run here yet. This page shows it when it starts."));
    return;
  }
  const focused = document.activeElement?.getAttribute("href");
  const newest = [...report.runs].sort((a, b) => String(b.started_at ?? "").localeCompare(String(a.started_at ?? "")));
  section.replaceChildren(element("div", { class: "table-frame card" }, element("table", { class: "listing" },
    element("thead", {}, element("tr", {}, COLUMNS.map((name) => element("th", { scope: "col" }, name)))),
    element("tbody", {}, newest.map(runRow)))));
  for (const link of section.querySelectorAll("a")) if (link.getAttribute("href") === focused) link.focus();
}

function runRow(run) {
  const name = element("th", { scope: "row" }, element("a", { href: `run/${encodeURIComponent(run.key)}/` }, run.name));
  if (run.error) return element("tr", {}, name, element("td", { colspan: COLUMNS.length - 1, class: "error" }, run.error));
  const step = run.step === null ? "\u2013" : `${run.step + 1}${run.num_steps ? ` of ${run.num_steps}` : ""}`;
  return element("tr", {}, name,
    element("td", {}, element("span", { class: `state ${run.status.replace(" ", "-")}` }, run.status)),
    element("td", {}, step), element("td", {}, formatNumber(run.reward)),
    element("td", {}, formatNumber(run.k3), " ", run.level === "unmeasured" ? null : element("span", { class: `badge ${run.level}`, title: "the worst step of the run" }, LEVELS[run.level])),
    element("td", {}, run.verdict || "\u2013"), element("td", {}, formatDate(run.started_at)));
}

async function follow() {
  const note = document.getElementById("foot");
  try {
    const response = await fetch("runs.json");
    if (!response.ok) throw new Error(await response.text());
    const fresh = (await response.json()).runs;
    if (JSON.stringify(fresh) !== JSON.stringify(report.runs)) {
      report.runs = fresh;
      drawRuns();
    }
    note.textContent = "";
  } catch (error) {
    note.textContent = `The server does not answer (${error.message}). What is shown are its last figures.`;
  }
  setTimeout(follow, POLL_MILLISECONDS);
}

document.getElementById("top").append(
  element("div", { class: "brand" }, element("span", {}, "Lockstep runs"), themeButton()), element("h1", {}, report.title));
drawRuns();
follow();
