// Follows a run that is served: its figures every two seconds, and search over all its trajectories.

const POLL_MILLISECONDS = 2000;
const bar = element("p", { class: "live" });
const newTrajectories = element("button", { type: "button", class: "theme", hidden: true, onclick: () => location.reload() }, "Show the trajectories stored since");
const stepAtLoad = report.live.step;

function drawState(problem = "") {
  const { status, step, num_steps: numSteps } = report.live;
  bar.replaceChildren(
    element("span", { class: `state ${status.replace(" ", "-")}` }, status),
    step === null ? "no step yet" : `step ${step + 1}${numSteps ? ` of ${numSteps}` : ""}`,
    ...(problem ? [element("span", { class: "error", role: "alert" }, problem)] : []));
  newTrajectories.hidden = step === stepAtLoad;
}

async function follow() {
  try {
    const response = await fetch(`figures.json?seen=${encodeURIComponent(report.live.version)}`);
    if (!response.ok) throw new Error(await response.text());
    const fresh = await response.json();
    if (fresh.live) {
      Object.assign(report, fresh);
      refreshHead();
      refreshCurves();
    }
    drawState();
  } catch (error) {
    drawState(`No answer (${error.message}). What is shown are the last figures.`);
  }
  setTimeout(follow, POLL_MILLISECONDS);
}

function refreshHead() {
  for (const [id, build] of [["top", buildTop], ["headlines", buildHeadlines]]) {
    const section = document.getElementById(id);
    section.replaceChildren();
    build(section);
  }
  addBar();
}

function addBar() {
  document.getElementById("top").append(element("div", { class: "live-row" }, bar, newTrajectories, element("a", { href: "../../" }, "All runs")));
}

// Draws the same charts again, or builds them anew where there are others.
function refreshCurves() {
  const specs = chartSpecs();
  const shape = (list) => JSON.stringify(list.map((spec) => [spec.title, spec.flat, spec.series.map((series) => series.label)]));
  if (shape(specs) === shape(view.charts.map((chart) => chart.spec))) {
    view.charts.forEach((chart, index) => { chart.spec = specs[index]; });
    drawCharts();
    return;
  }
  const section = document.getElementById("curves");
  section.replaceChildren();
  buildCurves(section);
  buildSections(document.getElementById("sections"));
}

// -- search ------------------------------------------------------------------------------------

async function searchAll(text, note) {
  note.textContent = "Searching all that is stored ...";
  try {
    const response = await fetch(`search.json?text=${encodeURIComponent(text)}`);
    if (!response.ok) throw new Error(await response.text());
    const { trajectories, num_searched: number, is_whole: isWhole, vocabulary } = await response.json();
    browser.add(text, trajectories, vocabulary);
    note.textContent = isWhole
      ? `${trajectories.length} of all ${number.toLocaleString("en-US")} stored trajectories hold this text.`
      : `The latest ${trajectories.length} that hold this text, out of the latest ${number.toLocaleString("en-US")} stored trajectories.`;
  } catch (error) {
    note.textContent = `The search failed: ${error.message}`;
  }
}

function addSearch() {
  const input = document.querySelector(".filters input");
  if (!input) return;
  const note = element("span", { class: "hint", role: "status" });
  const search = () => { if (input.value.trim()) searchAll(input.value.trim(), note); };
  input.placeholder = "search, Enter for all that is stored";
  input.addEventListener("keydown", (event) => { if (event.key === "Enter") search(); });
  input.addEventListener("input", () => { note.textContent = ""; });
  input.after(element("button", { type: "button", class: "theme", onclick: search }, "Search all stored"), note);
}

document.getElementById("foot").textContent = "Figures follow the run. Trajectories are those stored when the page was loaded, and what a search found.";
addBar();
addSearch();
drawState();
follow();
