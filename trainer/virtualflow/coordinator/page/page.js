// The live page of a job. Nothing here grows: nodes are made once and changed in place, lists are as long as what the
// coordinator sends, and that is bounded, and in its words.

const HOW = "Open the address that virtualflow run --web or kubectl vf ui JOB has printed: it bears the token of this page.";

// --- the job ---------------------------------------------------------------------------------------------------------

const shown = {now: null, job: null, log: null, series: null, have: "", curves: null};
let jobName = "";

// `silent`: since when there is no news; what was last said of the job is no more than that.
function showPhase(now, silent) {
  write(find("phase"), silent ? `no news since ${silent}` : now.phase);
  set(find("phase"), "class", `phase ${silent ? "silent" : now.phase}`);
}

function showHead(now, job) {
  write(find("name"), jobName || "A job");
  showPhase(now, "");
  const total = now.totalSteps;
  write(find("reason"), now.place.startsWith(job.reason) ? "" : job.reason);
  find("queue").hidden = !job.decided;
  write(find("queue"), `Decided: ${job.decided}`);
  document.title = `${jobName || "VirtualFlow"}: ${now.phase}${total ? `, ${Math.floor((100 * now.step) / total)} %` : ""}`;
  find("failure").hidden = !job.error;
  write(find("error"), job.error);
  find("traceback").hidden = !job.traceback;
  write(find("traceback"), job.traceback);
}

// What people ask first; all else that is known comes behind, as it is told.
const FIRST = ["Not finite", "", "Progress", "Started", "Speed", "Goodput", "Workers"], tiles = new Map();

function tile(name) {
  const words = {dt: make("dt", {}), value: make("span", {}), note: make("small", {})}, said = make("dd", {}, words.value, words.note);
  const node = make("div", {}, words.dt, said);
  if (name === "Progress") {
    set(words.value, "id", "progress");
    words.bar = make("div", {id: "bar", role: "progressbar", "aria-labelledby": "progress", "aria-valuemin": "0"}, make("span", {}));
    said.append(words.bar);
  }
  if (name === "Digest") said.insertBefore(copying(() => words.value.textContent), words.note);
  return {node, ...words};
}

function showFacts(now, job, series, silent) {
  const metric = Object.keys(series.metrics)[0] ?? Object.keys(now.metrics)[0], value = now.metrics[metric];
  const facts = new Map([["Progress", [now.place, now.times]]]);
  if (value !== undefined) facts.set("", [value, metric]);
  if (now.began !== null) facts.set("Started", [moment(now.began, now.time), ""]);
  for (const [name, ...said] of [...now.facts, ...job.facts]) facts.set(name, said);
  const moves = new Set(["", "Progress", "Workers", ...now.facts.map(([name]) => name)]);
  const names = [...FIRST.filter((name) => facts.has(name)), ...[...facts.keys()].filter((name) => !FIRST.includes(name))];
  for (const [name, one] of tiles) {
    if (facts.has(name)) continue;
    one.node.remove();
    tiles.delete(name);
  }
  names.forEach((name, place) => {
    if (!tiles.has(name)) tiles.set(name, tile(name));
    const {node, dt, value: shows, note, bar} = tiles.get(name), [said, more] = facts.get(name);
    const odd = name === "Not finite" || (name === "" && !Number.isFinite(Number(said)));
    set(node, "class", name === "Digest" ? "whole" : name === "Progress" ? "course" : odd ? "odd" : "");
    if (name) gloss(dt, name);
    else write(dt, more);
    write(shows, said);
    gloss(note, [silent && moves.has(name) ? `at ${silent}` : "", name ? more : ""].filter(Boolean).join(": "));
    if (bar) showBar(bar, now);
    if (find("facts").children[place] !== node) find("facts").insertBefore(node, find("facts").children[place] || null);
  });
}

function showBar(bar, now) {
  const total = now.totalSteps;
  bar.hidden = !total;
  if (!total) return;
  set(bar, "aria-valuemax", total);
  set(bar, "aria-valuenow", now.step);
  bar.firstElementChild.style.width = `${Math.min(100, (100 * now.step) / total)}%`;
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
  const bare = rowsOf("workers", ["name", "", ...Array(8).fill("number")]);
  const row = () => {
    const line = bare(), name = make("button", {type: "button", title: "Show its log"});
    name.addEventListener("click", () => readLog(name.textContent));
    line.children[0].append(make("span", {class: "swatch"}), name);
    return line;
  };
  const known = job.workers[0] ? job.workers[0].usage.map((_, place) => job.workers.some((worker) => worker.usage[place])) : [];
  const heads = find("workers").parentElement.tHead.rows[0].children;
  known.forEach((is, place) => { heads[5 + place].hidden = !is; });
  fit(find("workers"), job.workers, row, (line, worker) => {
    const [name, state, nodes, many, pace, ...usage] = line.children;
    usage.forEach((cell, place) => { write(cell, worker.usage[place]); cell.hidden = !known[place]; });
    paint(name.children[0], worker);
    set(name.children[0], "class", worker.count ? "swatch" : "swatch none");
    write(name.children[1], worker.worker);
    write(state, worker.state);
    set(state, "class", ["crashed", "silent"].includes(worker.state) ? "bad" : worker.slow ? "drain" : "");
    write(nodes, worker.nodes);
    write(many, grouped.format(worker.count));
    write(pace, worker.pace);
  });
}

// --- the log of one worker ------------------------------------------------------------------------------------------

let logOf = "";

async function readLog(worker) {
  logOf = worker;
  find("log").hidden = !worker;
  if (!worker) return;
  write(find("logged"), worker);
  const lines = find("lines"), answer = await get(`v1/log?worker=${encodeURIComponent(worker)}`);
  if (logOf !== worker || answer === null || answer.status === 429) return;
  const last = lines.scrollTop + lines.clientHeight >= lines.scrollHeight - 8;
  set(lines, "class", answer.ok ? "" : "reason");
  write(lines, answer.ok ? await answer.text() : (await answer.json()).message);
  if (last) lines.scrollTop = lines.scrollHeight;
}

find("unlog").addEventListener("click", () => readLog(""));

function showLog(now, log) {
  const changes = log.changes.slice().reverse();
  const older = log.changesTotal - changes.length;
  write(find("counted"), `${log.counted}${older > 0 ? `, the latest ${changes.length} of them below` : ""}.`);
  find("timeline").hidden = !changes.length;
  fillTable("changes", ["number", "", "cause", "why", "number", "number", "number", "number"], changes, (change) => change.row);
  changes.forEach((change, place) => set(find("changes").children[place].children[2], "class", `cause ${change.kind}`));
  find("latest").hidden = !log.events.length;
  const bare = rowsOf("events", ["time", "", "why"]);
  const event = () => {
    const line = bare();
    line.children[2].append(make("span", {}), make("pre", {}));
    return line;
  };
  fit(find("events"), log.events.slice().reverse(), event, (line, {time, kind, text}) => {
    const [when, what, {children: [said, more]}] = line.children, [first, ...rest] = text.split("\n");
    [[when, moment(time, now.time)], [what, kind], [said, first], [more, rest.join("\n")]].forEach(([node, words]) => write(node, words));
    more.hidden = !rest.length;
    set(more, "tabindex", rest.length ? 0 : -1);
  });
}

function showMetrics(now) {
  const metrics = Object.entries(now.metrics);
  find("numbers").hidden = !metrics.length;
  fillTable("metrics", ["", "number"], metrics, (metric) => metric);
}

function showCurves(now, log, series) {
  if (!shown.curves) shown.curves = new Curves(find("curves"), jobName || "job");
  const told = ([name, value]) => [name, Number.isFinite(Number(value)) ? Number(value) : value];
  const metrics = Object.fromEntries(Object.entries(now.metrics).map(told));
  const live = {step: now.step, since: now.stepTime ?? now.time, now: now.time, speed: now.stepsPerSecond, workers: now.training, metrics};
  shown.curves.take({series, changes: log.changes, nonFinite: series.nonFinite, live: {...live, training: now.phase === "training"}});
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
  showFacts(now, job, series, "");
  if (view.job) showWorkers(job);
  if (view.log) showLog(now, log);
  showMetrics(now);
  showCurves(now, log, series);
  speak(now, log);
  write(find("foot"), `As of ${calendar.format(new Date(1000 * now.time))}, ${moment(now.time, now.time)}. Read only. virtualflow ${job.version}.`);
  if (logOf) readLog(logOf);
  return {over: now.over, trouble: "", rest: 0};
}

function explain(answer) {
  const {now, job, series} = shown, silent = now ? moment(now.time, Date.now() / 1000) : "";
  if (now) {
    showPhase(now, silent);
    showFacts(now, job, series, silent);
    document.title = `${jobName || "VirtualFlow"}: no news`;
  }
  if (answer === null) return `The coordinator does not answer.${now ? ` What you see was last known at ${silent}.` : ""}`;
  if (answer.status === 429) return "Too many pages look at this job; this one tries again.";
  return `The coordinator refuses (${answer.status}).`;
}

explainWords();
jobName = takeFragment("token", "job").job;
follow(() => `v1/view?have=${encodeURIComponent(shown.have)}`, show, explain, HOW);
