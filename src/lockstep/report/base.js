// The report's data, and the small things that every part of the page uses. Text from the data only
// ever becomes a text node: nothing here parses markup.
"use strict";

const report = JSON.parse(document.getElementById("report-data").textContent);
const svgSpace = document.getElementById("svg-probe").namespaceURI;
const isComparison = report.groups.length > 1;
const NUM_COLOURS = 7;
const LEVELS = { ok: "normal", notice: "above normal", warning: "warning", critical: "critical", unmeasured: "not measured" };

function element(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

function svgElement(name, attributes = {}, ...children) {
  return fill(document.createElementNS(svgSpace, name), attributes, children);
}

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "style") for (const [k, v] of Object.entries(value)) node.style.setProperty(k, v);
    else node.setAttribute(key, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

function colour(index) {
  return `var(--series-${index % NUM_COLOURS})`;
}

function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

// Three significant digits; thousands are grouped; exponents only where they are needed.
function formatNumber(value, unit = "") {
  if (value === null || value === undefined) return "\u2013";
  if (!isNumber(value)) return String(value);
  if (unit === "seconds") return formatSeconds(value);
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3) return value.toExponential(1).replace(".0e", "e");
  if (size >= 1e7) return value.toExponential(2);
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  if (Number.isInteger(value)) return String(value);
  return value.toPrecision(3).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
}

function formatSeconds(seconds) {
  if (seconds < 10) return `${Number(seconds.toPrecision(2))} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const whole = Math.round(seconds);
  const hours = Math.floor(whole / 3600);
  const minutes = Math.floor((whole % 3600) / 60);
  return hours ? `${hours} h ${minutes} min` : `${minutes} min ${whole % 60} s`;
}

// Seconds have their unit in the number; bare numbers and rewards have none to show.
function unitToShow(unit) {
  return ["1", "reward", "seconds", "share", undefined, null].includes(unit) ? "" : unit;
}

function formatDate(text) {
  const date = new Date(text);
  return Number.isNaN(date.getTime()) ? text : date.toISOString().slice(0, 16).replace("T", " ") + " UTC";
}

function formatSetting(value) {
  if (value === null || value === undefined) return "\u2013";
  if (value === "") return "(empty)";
  return typeof value === "string" ? value : JSON.stringify(value);
}

// A row of buttons; one is chosen. Options: [{value, label, title?}].
function choice(label, options, chosen, choose) {
  const row = element("div", { class: "choice", role: "radiogroup", "aria-label": label });
  const buttons = options.map((option) =>
    element("button", {
      type: "button", role: "radio", title: option.title,
      onclick: () => { mark(option.value); choose(option.value); },
      onkeydown: (event) => {
        const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
        if (!by) return;
        event.preventDefault();
        const at = options.indexOf(option);
        const next = (at + by + options.length) % options.length;
        buttons[next].focus();
        buttons[next].click();
      },
    }, option.label));
  function mark(value) {
    options.forEach((option, index) => {
      const isChosen = option.value === value;
      buttons[index].setAttribute("aria-checked", String(isChosen));
      buttons[index].tabIndex = isChosen ? 0 : -1;
    });
  }
  mark(chosen);
  row.append(...buttons);
  row.mark = mark;
  return row;
}

function sectionTitle(text, ...beside) {
  return element("div", { class: "section-title" }, element("h2", {}, text), ...beside);
}

function themeButton() {
  const themes = ["light dark", "light", "dark"];
  const names = ["auto", "light", "dark"];
  let at = 0;
  const button = element("button", { type: "button", class: "theme", onclick: () => {
    at = (at + 1) % themes.length;
    document.documentElement.style.colorScheme = themes[at];
    button.textContent = `Theme: ${names[at]}`;
  } }, "Theme: auto");
  return button;
}
