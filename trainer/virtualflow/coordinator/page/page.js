"use strict";
// Nothing here grows: nodes are made once and changed in place, lists are as long as what the coordinator sends, and
// that is bounded, and in its words. What users have named (jobs, workers, metrics, errors) only ever becomes text.

const find = (id) => document.getElementById(id);
const HEIGHT = 176, LEFT = 52, RIGHT = 10, TOP = 10, BOTTOM = 24;
const TICKS = 6, ROWS = 12;
const PATIENCE = 15000, FIRST_RETRY = 1000, LAST_RETRY = 15000;
const HOW = "Open the address that virtualflow run --web or kubectl vf ui JOB has printed: it bears the token of this page.";

// --- words -----------------------------------------------------------------------------------------------------------

const grouped = new Intl.NumberFormat("en", {maximumFractionDigits: 0});
const short = new Intl.NumberFormat("en", {maximumSignificantDigits: 3, notation: "compact"});
const clock = new Intl.DateTimeFormat("en-GB", {timeStyle: "medium"});
const calendar = new Intl.DateTimeFormat("en-GB", {day: "numeric", month: "short"});

function amount(value) {
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  return String(Number(value.toPrecision(5)));
}

// The time of day, behind the day where it is another one.
function moment(time, now) {
  const [then, today] = [new Date(1000 * time), new Date(1000 * now)];
  return `${then.toDateString() === today.toDateString() ? "" : `${calendar.format(then)}, `}${clock.format(then)}`;
}

// --- nodes -----------------------------------------------------------------------------------------------------------

function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function set(node, name, value) {
  if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

function make(name, attributes, ...children) {
  const space = ["svg", "path", "line", "text"].includes(name) ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml";
  const node = document.createElementNS(space, name);
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

function fillTable(id, classes, items, cells) {
  const row = () => make("tr", {}, ...classes.map((name) => make("td", name ? {class: name} : {})));
  fit(find(id), items, row, (line, item) => {
    cells(item).forEach((cell, place) => write(line.children[place], cell));
  });
}

// A colour of a worker's own, by the number in its name: neighbours differ.
function hue(name) {
  const number = /(\d+)(?:\.\d+)?$/.exec(name);
  let value = number ? Number(number[1]) : 0;
  if (!number) for (const letter of name) value = (value * 31 + letter.codePointAt(0)) % 9973;
  return Math.round((value * 137.508 + 210) % 360);
}

function paint(node, worker) {
  const colour = worker.count ? `hsl(${hue(worker.worker)} 55% 55%)` : "";
  if (node.dataset.colour === colour) return;
  node.dataset.colour = colour;
  node.style.background = colour;
}

// --- the job ---------------------------------------------------------------------------------------------------------

const shown = {now: null, job: null, log: null, series: null, have: ""};
let jobName = "";

function showHead(now, job) {
  write(find("name"), jobName || "A job");
  write(find("phase"), now.phase);
  set(find("phase"), "class", `phase ${now.phase}`);
  write(find("progress"), now.progress);
  const total = now.totalSteps, bar = find("bar");
  bar.hidden = !total;
  if (total) {
    set(bar, "aria-valuemax", total);
    set(bar, "aria-valuenow", now.step);
    bar.firstElementChild.style.width = `${Math.min(100, (100 * now.step) / total)}%`;
  }
  write(find("reason"), job.reason);
  find("queue").hidden = !job.decided;
  write(find("queue"), `Decided: ${job.decided}`);
  document.title = `${jobName || "VirtualFlow"}: ${now.phase}${total ? `, ${Math.floor((100 * now.step) / total)} %` : ""}`;
  find("failure").hidden = !job.error;
  write(find("error"), job.error);
  find("traceback").hidden = !job.traceback;
  write(find("traceback"), job.traceback);
}

function showFacts(now, job) {
  const fact = () => make("div", {}, make("dt", {}), make("dd", {}, make("span", {}), make("small", {})));
  fit(find("facts"), [...now.facts, ...job.facts], fact, (node, [name, value, note]) => {
    const [term, definition] = node.children;
    set(node, "class", name === "Digest" ? "whole" : "");
    write(term, name);
    write(definition.children[0], value);
    write(definition.children[1], note);
  });
}

function showWorkers(job) {
  const assigned = job.workers.filter((worker) => worker.count);
  fit(find("strip"), assigned, () => make("i", {}), (node, worker) => {
    node.style.flexGrow = worker.count;
    paint(node, worker);
    node.title = `${worker.worker}: ${worker.nodes}`;
  });
  set(find("strip"), "aria-label", "Virtual nodes over workers; the table below says the same.");
  write(find("missing"), job.notes.join(" "));
  const row = () => make(
    "tr", {}, make("td", {class: "name"}, make("span", {class: "swatch"}), make("span", {})), make("td", {}),
    ...[1, 2, 3].map(() => make("td", {class: "number"})),
  );
  fit(find("workers"), job.workers, row, (line, worker) => {
    const [name, state, nodes, many, pace] = line.children;
    paint(name.children[0], worker);
    set(name.children[0], "class", worker.count ? "swatch" : "swatch none");
    write(name.children[1], worker.worker);
    write(state, worker.state);
    write(nodes, worker.nodes);
    write(many, grouped.format(worker.count));
    write(pace, worker.pace);
  });
}

function showLog(now, log) {
  const changes = log.changes.slice().reverse();
  const older = log.changesTotal - changes.length;
  write(find("counted"), `${log.counted}${older > 0 ? `, the latest ${changes.length} of them below` : ""}.`);
  find("timeline").hidden = !changes.length;
  fillTable("changes", ["number", "", "cause", "why", "number", "number", "number", "number"], changes, (change) => change.row);
  changes.forEach((change, place) => set(find("changes").children[place].children[2], "class", `cause ${change.kind}`));
  find("latest").hidden = !log.events.length;
  fillTable("events", ["number", "", "why"], log.events.slice().reverse(), (event) => [
    moment(event.time, now.time), event.kind, event.text,
  ]);
}

function showMetrics(now) {
  const metrics = Object.entries(now.metrics);
  find("numbers").hidden = !metrics.length;
  fillTable("metrics", ["", "number"], metrics, (metric) => metric);
}

// --- charts ----------------------------------------------------------------------------------------------------------

// Round numbers between the two; where only whole ones make sense, these.
function ticks(low, high, whole) {
  const rough = Math.max((high - low) / (TICKS - 1) || 1, whole ? 1 : 0);
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough);
  const found = [];
  for (let tick = Math.ceil(low / size) * size; tick <= high + size / 1e6 && found.length < TICKS; tick += size) {
    found.push(Math.abs(tick) < size / 1e6 ? 0 : tick);
  }
  return found;
}

class Chart {
  constructor(name, {from, whole}) {
    this.name = name;
    this.from = from; // the lowest value that is always shown; null: that of the curve
    this.whole = whole;
    this.steps = [];
    this.values = [];
    this.changes = [];
    this.width = 400;
    this.at = null;
    this.title = make("strong", {});
    this.value = make("span", {});
    this.lines = Array.from({length: TICKS}, () => make("line", {class: "grid"}));
    this.texts = Array.from({length: 2 * TICKS}, () => make("text", {}));
    this.marks = make("path", {class: "mark"});
    this.curve = make("path", {});
    this.here = make("line", {class: "here"});
    this.svg = make("svg", {role: "img", tabindex: "0"}, ...this.lines, ...this.texts, this.marks, this.curve, this.here);
    this.node = make("figure", {}, make("figcaption", {}, this.title, this.value), this.svg);
    write(this.title, name);
    this.svg.addEventListener("pointermove", (event) => this.pointAt(event.offsetX));
    this.svg.addEventListener("pointerleave", () => this.choose(null));
    this.svg.addEventListener("blur", () => this.choose(null));
    this.svg.addEventListener("keydown", (event) => this.move(event));
  }

  pointAt(x) {
    if (!this.steps.length) return;
    const step = this.low + ((x - LEFT) / (this.width - LEFT - RIGHT)) * (this.high - this.low);
    let nearest = 0;
    this.steps.forEach((known, place) => {
      if (Math.abs(known - step) < Math.abs(this.steps[nearest] - step)) nearest = place;
    });
    this.choose(nearest);
  }

  move(event) {
    const last = this.steps.length - 1, at = this.at === null ? last : this.at;
    const places = {ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last};
    if (last < 0 || !(event.key in places)) return;
    event.preventDefault();
    this.choose(Math.max(0, Math.min(last, places[event.key])));
  }

  choose(place) {
    this.at = place;
    this.tell();
  }

  tell() {
    const last = this.steps.length - 1, place = this.at === null ? last : Math.min(this.at, last);
    const value = last < 0 ? null : this.values[place];
    const text = value === null || value === undefined ? "no figure yet" : amount(value);
    const where = place === last || last < 0 ? "" : ` at step ${grouped.format(this.steps[place])}`;
    write(this.value, text + where);
    const x = place < 0 || this.at === null ? -9 : this.x(this.steps[place]);
    set(this.here, "x1", x);
    set(this.here, "x2", x);
  }

  x(step) {
    return Math.round(10 * (LEFT + ((this.width - LEFT - RIGHT) * (step - this.low)) / (this.high - this.low || 1))) / 10;
  }

  take(steps, values, changes) {
    [this.steps, this.values, this.changes] = [steps, values, changes];
    this.draw();
  }

  resize(width) {
    if (Math.round(width) === this.width || width < 1) return;
    this.width = Math.round(width);
    this.draw();
  }

  draw() {
    const {steps, values, changes} = this;
    set(this.svg, "viewBox", `0 0 ${this.width} ${HEIGHT}`);
    const known = values.filter((value) => value !== null);
    let bottom = Math.min(...known), top = Math.max(...known);
    if (!known.length) [bottom, top] = [0, 1];
    if (this.from !== null) bottom = Math.min(this.from, bottom);
    const room = (top - bottom) * 0.05 || Math.abs(top) * 0.05 || 1;
    top += room;
    if (this.from === null || bottom < this.from) bottom -= room;
    this.low = steps.length ? steps[0] : 0;
    this.high = steps.length ? steps[steps.length - 1] : 1;
    const y = (value) => Math.round(10 * (TOP + (HEIGHT - TOP - BOTTOM) * (1 - (value - bottom) / (top - bottom)))) / 10;
    this.grid(y, bottom, top);
    let path = "", pen = "M";
    values.forEach((value, place) => {
      path += value === null ? "" : `${pen}${this.x(steps[place])},${y(value)}`;
      pen = value === null ? "M" : "L";
    });
    set(this.curve, "d", path);
    const within = changes.filter((change) => change.step > this.low && change.step <= this.high);
    set(this.marks, "d", within.map((change) => `M${this.x(change.step)},${TOP}V${HEIGHT - BOTTOM}`).join(""));
    set(this.here, "y1", TOP);
    set(this.here, "y2", HEIGHT - BOTTOM);
    const span = known.length ? `from ${amount(Math.min(...known))} to ${amount(Math.max(...known))}, lately ${amount(known[known.length - 1])}` : "no figures yet";
    set(this.svg, "aria-label", `${this.name} over steps ${this.low} to ${this.high}: ${span}. Arrow keys go from point to point.`);
    this.tell();
  }

  grid(y, bottom, top) {
    const across = ticks(bottom, top, this.whole), along = ticks(this.low, this.high, true);
    this.lines.forEach((line, place) => {
      const used = place < across.length;
      set(line, "visibility", used ? "visible" : "hidden");
      if (!used) return;
      set(line, "x1", LEFT);
      set(line, "x2", this.width - RIGHT);
      set(line, "y1", y(across[place]));
      set(line, "y2", y(across[place]));
    });
    this.texts.forEach((text, place) => {
      const up = place < TICKS, tick = up ? across[place] : along[place - TICKS];
      write(text, tick === undefined ? "" : short.format(tick));
      if (tick === undefined) return;
      set(text, "x", up ? LEFT - 6 : this.x(tick));
      set(text, "y", up ? y(tick) + 4 : HEIGHT - 6);
      set(text, "text-anchor", up ? "end" : "middle");
    });
  }
}

const charts = new Map();
const sizes = new ResizeObserver((entries) => {
  for (const {target, contentRect} of entries) {
    for (const chart of charts.values()) if (chart.svg === target) chart.resize(contentRect.width);
  }
});

// What is known over the steps, and the latest figure behind it: the coordinator tells of a point once it is complete.
function curves(now, series) {
  const steps = series.steps.filter((step) => step <= now.step);
  const last = steps.length && steps[steps.length - 1] === now.step;
  const add = (values, value) => {
    const known = values.slice(0, steps.length);
    return last ? known : [...known, Number.isFinite(value) ? value : null];
  };
  const found = [["Steps a second", {from: 0, whole: false}, add(series.speed, now.stepsPerSecond || null)]];
  for (const [name, values] of Object.entries(series.metrics)) {
    found.push([name, {from: null, whole: false}, add(values, Number(now.metrics[name]))]);
  }
  found.push(["Workers", {from: 0, whole: true}, add(series.workers, now.training || null)]);
  return {steps: last ? steps : [...steps, now.step], columns: found};
}

function showCharts(now, log, series) {
  const {steps, columns} = curves(now, series);
  const names = columns.map(([name], place) => `${place === 0 || place === columns.length - 1}:${name}`);
  for (const [key, chart] of charts) {
    if (names.includes(key)) continue;
    sizes.unobserve(chart.svg);
    chart.node.remove();
    charts.delete(key);
  }
  columns.forEach(([name, axis, values], place) => {
    let chart = charts.get(names[place]);
    if (!chart) {
      chart = new Chart(name, axis);
      charts.set(names[place], chart);
      sizes.observe(chart.svg);
      find("charts").insertBefore(chart.node, find("charts").children[place] || null);
    }
    chart.take(steps, values, log.changes);
  });
  const rows = Math.min(ROWS, steps.length);
  const places = Array.from({length: rows}, (_, row) => Math.round((row * (steps.length - 1)) / Math.max(1, rows - 1)));
  fit(find("columns"), ["Step", ...columns.map(([name]) => name)], () => make("th", {scope: "col", class: "number"}), write);
  fit(find("figures"), places, () => make("tr", {}), (line, place) => {
    const cells = [grouped.format(steps[place]), ...columns.map(([, , values]) => (values[place] === null ? "" : amount(values[place])))];
    fit(line, cells, () => make("td", {class: "number"}), write);
  });
}

// --- what is said aloud: the phase and the latest change, and no more than that ---------------------------------------

const spoken = {phase: null, change: null, at: -Infinity};

function speak(now, log) {
  const mark = log.latest;
  const news = [];
  if (spoken.phase !== null && spoken.phase !== now.phase) news.push(`The job is ${now.phase}.`);
  if (spoken.change !== null && mark && spoken.change !== mark) news.push(`${mark}.`);
  if (news.length && performance.now() < spoken.at + 5000) return;
  [spoken.phase, spoken.change] = [now.phase, mark];
  if (!news.length) return;
  spoken.at = performance.now();
  write(find("said"), news.join(" "));
}

// --- asking ----------------------------------------------------------------------------------------------------------

function show(view) {
  shown.have = view.have;
  for (const part of ["now", "job", "log", "series"]) if (view[part]) shown[part] = view[part];
  const {now, job, log, series} = shown;
  find("all").hidden = false;
  showHead(now, job);
  showFacts(now, job);
  if (view.job) showWorkers(job);
  if (view.log) showLog(now, log);
  showMetrics(now);
  showCharts(now, log, series);
  speak(now, log);
  write(find("foot"), `As of ${calendar.format(new Date(1000 * now.time))}, ${moment(now.time, now.time)}. Read only. virtualflow ${job.version}.`);
}

function complain(sentence) {
  const trouble = find("trouble");
  trouble.hidden = !sentence;
  write(trouble, sentence);
}

const sleep = (time) => new Promise((wake) => { setTimeout(wake, time); });

function visible() {
  if (!document.hidden) return Promise.resolve();
  return new Promise((wake) => { document.addEventListener("visibilitychange", wake, {once: true}); });
}

// The status of the answer, and the view; null: nobody answers.
async function ask(token) {
  try {
    const answer = await fetch(`v1/view?have=${encodeURIComponent(shown.have)}`, {
      headers: {Authorization: `Bearer ${token}`}, cache: "no-store", signal: AbortSignal.timeout(PATIENCE),
    });
    return {status: answer.status, view: answer.ok ? await answer.json() : null};
  } catch {
    return null;
  }
}

function explain(answer) {
  if (answer === null) {
    return shown.now ? "The coordinator does not answer. What you see is the latest that it said." : "The coordinator does not answer.";
  }
  if (answer.status === 429) return "Too many pages look at this job; this one tries again.";
  return `The coordinator refuses (${answer.status}).`;
}

function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1));
  if (given.get("token")) {
    sessionStorage.setItem("token", given.get("token"));
    sessionStorage.setItem("job", given.get("job") || "");
    history.replaceState(null, "", location.pathname);
  }
  jobName = sessionStorage.getItem("job") || "";
  return sessionStorage.getItem("token");
}

async function follow() {
  const token = takeToken();
  if (!token) {
    complain(`This page has no token. ${HOW}`);
    return;
  }
  let retry = FIRST_RETRY;
  for (;;) {
    await visible();
    const answer = await ask(token);
    if (answer !== null && answer.view) {
      show(answer.view);
      complain("");
      if (shown.now.over) return;
      retry = FIRST_RETRY;
    } else if (answer !== null && (answer.status === 401 || answer.status === 403)) {
      sessionStorage.removeItem("token");
      complain(`The token is wrong. ${HOW}`);
      return;
    } else {
      complain(explain(answer));
      await sleep(retry);
      retry = Math.min(2 * retry, LAST_RETRY);
    }
  }
}

window.addEventListener("hashchange", () => { if (location.hash.includes("token=")) location.reload(); });
follow();
