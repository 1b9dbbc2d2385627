// The browser of all rows: lists come from the server a page at a time, and a row when it is opened.

const served = { query: { sort: "mismatch", page: 0 }, rows: [], chosen: null, nodes: new Map(), asked: 0 };
const ORDERS = { mismatch: "largest mismatch", order: "as stored", long: "most tokens", low: "lowest reward", high: "highest reward" };

async function ask(path) {
  const answer = await fetch(path);
  const content = await answer.json();
  if (!answer.ok) throw new Error(content.error);
  return content;
}

function buildServed(section) {
  const option = (value, text) => element("option", { value }, text);
  const picker = (name, any, values) => (values.length > (name === "check" ? 0 : 1)
    ? element("select", { "aria-label": name, oninput: (event) => refine({ [name]: event.target.value }) },
      option("", any), values.map((value) => option(String(value), name === "turn" ? `worst in turn ${value + 1}` : name === "kind" ? `worst at ${value}` : String(value))))
    : null);
  let pause = 0;
  const text = element("input", { type: "search", placeholder: "id or task", "aria-label": "Search", oninput: () => {
    clearTimeout(pause);
    pause = setTimeout(() => refine({ text: text.value }), 250);
  } });
  const count = element("span", { class: "count", role: "status" });
  const before = element("button", { type: "button", onclick: () => turnPage(-1) }, "\u2190");
  const after = element("button", { type: "button", onclick: () => turnPage(1) }, "\u2192");
  const pageName = element("span", {});
  const list = element("div", { class: "list", role: "listbox", tabindex: 0, "aria-label": "Rows" });
  const detail = element("div", { class: "detail", tabindex: -1 });
  list.addEventListener("keydown", (event) => {
    const at = served.rows.findIndex((row) => row.number === served.chosen);
    const next = { ArrowDown: at + 1, j: at + 1, ArrowUp: at - 1, k: at - 1, Home: 0, End: served.rows.length - 1 }[event.key];
    if (next === undefined || event.ctrlKey || event.metaKey || !served.rows.length) return;
    event.preventDefault();
    const row = served.rows[Math.min(served.rows.length - 1, Math.max(0, next))];
    open(row.number);
    served.nodes.get(row.number).scrollIntoView({ block: "nearest" });
  });

  const refine = (change) => { Object.assign(served.query, change, { page: 0 }); load(); };
  const turnPage = (by) => { served.query.page += by; load(); list.scrollTop = 0; };

  async function load() {
    const number = ++served.asked;
    const query = new URLSearchParams(Object.entries(served.query).filter(([, value]) => value !== "" && value !== undefined));
    try {
      const found = await ask(`rows?${query}`);
      if (number !== served.asked) return; // a later question was asked meanwhile
      served.rows = found.rows;
      served.nodes = new Map(found.rows.map((row) => [row.number, rowNode(row)]));
      list.replaceChildren(...served.nodes.values());
      count.textContent = `${found.total.toLocaleString("en-US")} of ${report.num_rows.toLocaleString("en-US")}`;
      pageName.textContent = found.pages ? `${found.page + 1} / ${found.pages}` : "none";
      before.disabled = found.page <= 0;
      after.disabled = found.page + 1 >= found.pages;
      mark();
      if (served.chosen === null && found.rows.length) open(found.rows[0].number);
    } catch (error) {
      list.replaceChildren(element("p", { class: "error" }, error.message));
    }
  }

  function mark() {
    for (const [number, node] of served.nodes) node.setAttribute("aria-selected", String(number === served.chosen));
  }

  // Of a row that is too long to be shown at once: the tokens before and after.
  function tokenPages(row, number) {
    if (!row.cut) return null;
    const size = row.last_token + 1 - row.first_token;
    const button = (text, first, isOn) => element("button", { type: "button", disabled: !isOn, onclick: () => open(number, Math.max(0, first)) }, text);
    return element("p", { class: "pages" }, button("\u2190", row.first_token - size, row.first_token > 0), row.cut,
      button("\u2192", row.last_token + 1, row.last_token + 1 < row.num_row_tokens));
  }

  async function open(number, first = null) {
    served.chosen = number;
    mark();
    try {
      const { row, vocabulary } = await ask(`row/${number}${first === null ? "" : `?first=${first}`}`);
      if (served.chosen !== number) return;
      history.replaceState(null, "", `#${number}`);
      report.vocabularies[0] = vocabulary;
      controlSets.clear();
      prepare(row, number);
      browser.chosen = row;
      browser.leaf = row.rewards.length ? row.rewards[0][0] : row.leaves.at(-1) ?? null;
      drawDetail(detail);
      const pages = tokenPages(row, number);
      if (pages) detail.prepend(pages);
      detail.scrollTop = 0;
    } catch (error) {
      detail.replaceChildren(element("p", { class: "error" }, error.message));
    }
  }

  const rowNode = (row) => element("div", { class: "row", role: "option", onclick: () => open(row.number) },
    element("span", { class: "row-reward" }, formatNumber(row.reward)),
    element("span", { class: "row-main" },
      element("span", { class: "row-title", title: row.id }, row.id),
      element("span", { class: "row-facts" }, [
        row.status === "finished" ? null : row.status, row.step === null ? null : `step ${row.step}`, row.split === "train" ? null : row.split,
        `${row.num_tokens} tokens`, row.largest === null ? null : `\u0394 ${formatNumber(row.largest)}`,
        row.turn === null ? null : `turn ${row.turn + 1}`, row.kind, ...row.checks].filter(Boolean).join(" \u00b7 "))));

  section.append(
    sectionTitle("Rows", element("span", { class: "hint" }, "Turn and kind are of the token with the largest difference.")),
    element("div", { class: "filters" }, text,
      element("select", { "aria-label": "Sort by", oninput: (event) => refine({ sort: event.target.value }) }, Object.entries(ORDERS).map(([key, label]) => option(key, label))),
      picker("check", "any check", report.checks), picker("turn", "any turn", report.turns), picker("kind", "any kind", report.kinds),
      picker("split", "any split", report.splits), picker("status", "any status", report.statuses),
      count, element("span", { class: "pages" }, before, pageName, after)),
    element("div", { class: "browser card" }, list, detail));
  const asked = /^#(\d+)$/.exec(location.hash);
  load().then(() => { if (asked) open(Number(asked[1])); });
}

document.getElementById("top").append(
  element("div", { class: "brand" }, element("span", {}, "Lockstep rows"), themeButton()),
  element("h1", {}, report.title),
  element("div", { class: "verdict" }, element("span", { class: `badge ${report.outcome}` }, report.outcome.replaceAll("_", " ")), element("span", { class: "hint" }, report.input)));
browser.mode = "difference";
buildServed(document.getElementById("trajectories"));
document.getElementById("foot").textContent = `Served from ${report.input}, which is only read.`;
