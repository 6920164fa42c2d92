"use strict";
// Words and nodes, of which the live page and the page of a report are made. What users have named (jobs, workers,
// metrics, errors) only ever becomes text.

const find = (id) => document.getElementById(id);

// --- words -----------------------------------------------------------------------------------------------------------

const grouped = new Intl.NumberFormat("en", {maximumFractionDigits: 0});
const clock = new Intl.DateTimeFormat("en-GB", {timeStyle: "medium"});
const calendar = new Intl.DateTimeFormat("en-GB", {day: "numeric", month: "short"});

function amount(value) {
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  return String(Number(value.toPrecision(6))); // as many digits as a tile
}

// The time of day, behind the day where it is another one.
function moment(time, now) {
  const [then, today] = [new Date(1000 * time), new Date(1000 * now)];
  return `${then.toDateString() === today.toDateString() ? "" : `${calendar.format(then)}, `}${clock.format(then)}`;
}

// --- what words mean, on hover and for the keyboard --------------------------------------------------------------------

const TERMS = Object.keys(WORDS).sort((one, other) => other.length - one.length), TERM = new RegExp(`\\b(${TERMS.join("|")})\\b`, "i");

// Writes a text in which such words can be asked.
function gloss(node, text) {
  if (node.textContent === text) return;
  const parts = text.split(TERM).map((part) => {
    const place = TERMS.indexOf(part.toLowerCase());
    return place < 0 ? part : make("span", {class: "word", tabindex: "0", "aria-describedby": `word-${place}`}, part);
  });
  node.replaceChildren(...parts);
}

function explainWords() {
  const tip = make("div", {class: "tip meaning", "aria-hidden": "true", hidden: ""});
  document.body.append(tip, make("div", {hidden: ""}, ...TERMS.map((term, place) => make("p", {id: `word-${place}`}, WORDS[term]))));
  let word = null;
  const place = () => {
    tip.hidden = !word;
    if (!word) return;
    write(tip, find(word.getAttribute("aria-describedby")).textContent);
    const at = word.getBoundingClientRect(), below = at.bottom + tip.offsetHeight + 8 < innerHeight;
    tip.style.left = `${Math.max(4, Math.min(at.left, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${below ? at.bottom + 4 : at.top - tip.offsetHeight - 4}px`;
  };
  const about = (next) => { word = next; place(); };
  for (const name of ["mouseover", "focusin"]) {
    document.addEventListener(name, ({target}) => { if (target.closest(".word")) about(target.closest(".word")); });
  }
  for (const name of ["mouseout", "focusout"]) document.addEventListener(name, () => { if (word) about(null); });
  document.addEventListener("scroll", place, true);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") about(null); });
  for (const node of document.querySelectorAll("th, dt, dd small")) {
    const text = node.childElementCount ? "" : node.textContent;
    if (TERM.test(text)) { write(node, ""); gloss(node, text); }
  }
}

function copying(text) {
  const button = make("button", {type: "button", class: "copy"}, "Copy");
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text());
    write(button, "Copied");
    setTimeout(() => write(button, "Copy"), 2000);
  });
  return button;
}

// --- nodes -----------------------------------------------------------------------------------------------------------

function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function set(node, name, value) {
  if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

function make(name, attributes, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

// As many children as there are items: those that are there are used again.
function fit(parent, items, create, change) {
  while (parent.childElementCount > items.length) parent.lastElementChild.remove();
  while (parent.childElementCount < items.length) parent.append(create());
  let child = parent.firstElementChild;
  for (const item of items) {
    change(child, item);
    child = child.nextElementSibling;
  }
}

// Makes rows of a table, with a class for each cell. On a phone, where a row is a card, each cell bears its head.
function rowsOf(id, classes) {
  const heads = [...find(id).closest("table").tHead.rows[0].cells].map((cell) => cell.textContent);
  return () => make("tr", {}, ...classes.map((name, place) => make("td", {"data-head": heads[place], ...(name ? {class: name} : {})})));
}

function fillTable(id, classes, items, cells) {
  fit(find(id), items, rowsOf(id, classes), (line, item) => {
    cells(item).forEach((cell, place) => write(line.children[place], cell));
  });
}

// A colour of a worker's own, by the number in its name: neighbours differ, and none is red, as what is wrong is.
function hue(name) {
  const number = /(\d+)(?:\.\d+)?$/.exec(name);
  let value = number ? Number(number[1]) : 0;
  if (!number) for (const letter of name) value = (value * 31 + letter.codePointAt(0)) % 9973;
  return Math.round(40 + 280 * ((value * 0.618034 + 0.6) % 1));
}

function paint(node, worker) {
  const colour = worker.count ? `hsl(${hue(worker.worker)} 55% 55%)` : "";
  if (node.dataset.colour === colour) return;
  node.dataset.colour = colour;
  node.style.background = colour;
}
