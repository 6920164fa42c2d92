// What of a job's figures is drawn, and in which words: without any node.

const SPEED = "Steps a second", WORKERS = "Workers";
const UNITS = {[SPEED]: "steps/s", [WORKERS]: "workers"};
const APART = 0.15; // seconds between two points that a speed is taken from, at least
const NUMBERS = Array.from({length: 25}, (_, place) => [1, 2, 5].map((factor) => Number(`${factor}e${place - 12}`))).flat();
const STEPS = NUMBERS.filter((number) => number >= 1);
const SECONDS = [
  ...[1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800], ...[1, 2, 3, 6, 12, 24, 48, 96, 168, 336, 672].map((hours) => 3600 * hours),
];
const KINDS = {
  join: "a worker joins", drain: "a worker leaves as planned", loss: "a worker is lost", moved: "virtual nodes move", other: "another change",
  pause: "nobody completes a step", away: "no news: the coordinator was away", nan: "a metric is not finite", under: "the run laid under",
};

// The figures of a series, and behind them the latest: the coordinator tells of a point once it is complete.
function runOf(series, live) {
  let many = series.steps.length;
  while (live && many && series.steps[many - 1] > live.step) many -= 1;
  const ahead = live && (!many || series.steps[many - 1] < live.step);
  const take = (values, latest) => [...values.slice(0, many), ...(ahead ? [typeof latest === "number" ? latest : null] : [])];
  const began = series.began ?? (live ? live.since : 0);
  const elapsed = (time) => (typeof time === "number" ? time - began : null);
  const metrics = Object.entries(series.metrics).map(([name, values]) => [name, take(values, live && live.metrics[name])]);
  const own = [[SPEED, take(series.speed, live && (live.speed || null))], [WORKERS, take(series.workers, live && (live.workers || series.workers[many - 1]))]];
  const breaks = (series.breaks || []).map((one) => ({...one, since: elapsed(one.since), until: elapsed(one.until)}));
  if (live && live.training && live.now - live.since > Math.max(2, 3 / (live.speed || 1))) {
    breaks.push({before: live.step, step: live.step, since: elapsed(live.since), until: elapsed(live.now), unheard: false});
  }
  return {
    began, breaks, steps: take(series.steps, live && live.step), times: take((series.times || []).map(elapsed), live && elapsed(live.since)),
    columns: new Map([...metrics.slice(0, 1), ...own, ...metrics.slice(1)]),
  };
}

// From a step to its place on the axis; between two steps of which the time is known, in between.
function placer(run, byTime) {
  if (!byTime) return (step) => step;
  const known = run.steps.map((step, place) => [step, run.times[place]]).filter(([, time]) => typeof time === "number");
  for (const one of run.breaks) known.push([one.before, one.since], [one.step, one.until]);
  known.sort((one, other) => one[0] - other[0] || one[1] - other[1]);
  return (step) => {
    const next = known.findIndex(([at]) => at >= step);
    if (next <= 0) return known.length ? known[next < 0 ? known.length - 1 : 0][1] : 0;
    const [[early, from], [late, to]] = [known[next - 1], known[next]];
    return late === step ? to : from + ((to - from) * (step - early)) / (late - early);
  };
}

// The mean begins anew at the places in `anew`.
function smooth(values, weight, anew) {
  let mean = 0, left = 1;
  return values.map((value, place) => {
    if (anew.has(place)) [mean, left] = [0, 1];
    if (typeof value !== "number") return value;
    mean = weight * mean + (1 - weight) * value;
    left *= weight;
    return mean / (1 - left);
  });
}

// Steps over the time between two points: what the smoothed speed is the mean of, pauses included.
function rawSpeed(run) {
  let last = 0;
  return run.steps.map((step, place) => {
    const passed = run.times[place] - run.times[last];
    if (typeof run.times[place] !== "number" || (place && passed < APART)) return undefined;
    const broken = run.breaks.some((one) => one.step > run.steps[last] && one.before < step);
    const speed = place && !broken ? (step - run.steps[last]) / passed : null;
    last = place;
    return speed;
  });
}

// Rows of place, step and figures; one with nothing in each break, so that lines end there. What is undefined is skipped, unless it is
// beside a break: that would begin in its midst.
function rows(run, byTime, ...columns) {
  const found = run.steps.map((step, place) => [byTime ? run.times[place] : step, step, ...columns.map((values) => values[place])]);
  const middle = (one) => (byTime ? (one.since + one.until) / 2 : one.before + 0.5);
  const empty = run.breaks.map((one) => [middle(one), one.before, ...columns.map(() => null)]);
  const sorted = [...found, ...empty].filter(([x]) => typeof x === "number").sort((one, other) => one[0] - other[0]);
  const widen = (row, place, all) => {
    if (place) all[place - 1].forEach((value, column) => { if (value === null && row[column] === undefined) row[column] = null; });
  };
  sorted.forEach(widen);
  sorted.reverse().forEach(widen);
  return sorted.reverse();
}

// The number of workers changes at a step and not between two points: what the changes say goes before the points.
function exactWorkers(run, changes) {
  const last = run.steps[run.steps.length - 1], kept = [];
  for (const change of changes.slice().reverse()) {
    if (change.step <= last && (!kept.length || change.step < kept[0].step)) kept.unshift(change); // later ones were undone
  }
  const points = new Map(run.steps.map((step, place) => [step, run.columns.get(WORKERS)[place]]));
  for (const change of kept) if (change.step >= run.steps[0]) points.set(change.step, change.to);
  for (const step of points.keys()) {
    const change = kept.findLast((one) => one.step <= step);
    if (change) points.set(step, change.to);
  }
  const steps = [...points.keys()].sort((one, other) => one - other), place = placer(run, true);
  return {...run, steps, times: steps.map(place), columns: new Map([[WORKERS, steps.map((step) => points.get(step))]])};
}

function drawn(run, name, {byTime, weight, changes}) {
  const exact = name === WORKERS ? exactWorkers(run, changes) : run, values = exact.columns.get(name) || [];
  if (name === WORKERS) return rows(exact, byTime, values.map(() => undefined), values);
  // Where a speed is of steps before and after a change, it is neither's, and the line ends there.
  const mixed = new Set(name === SPEED ? changes.map((change) => run.steps.findIndex((step) => step >= change.step)) : []);
  const apart = values.map((value, place) => (mixed.has(place) ? null : value));
  const raw = name === SPEED ? rawSpeed(run) : values.map((value) => (weight ? value : undefined));
  return rows(run, byTime, raw, smooth(apart, weight, mixed));
}

// --- words of an axis ------------------------------------------------------------------------------------------------

// As many digits as neighbours on an axis differ by.
function tick(value, apart) {
  if (value === 0) return "0";
  const [size, least] = [Math.floor(Math.log10(Math.abs(value))), Math.floor(Math.log10(apart) + 1e-9)];
  if (least < -4) return value.toExponential(Math.max(0, size - least));
  if (size < 4) return value.toFixed(Math.max(0, -least));
  return new Intl.NumberFormat("en", {notation: "compact", maximumSignificantDigits: Math.max(1, size - least + 1)}).format(value);
}

const shownOf = (name, value) => amount(name === SPEED ? Number(value.toPrecision(3)) : value);

function since(seconds) {
  const two = (number) => String(Math.floor(number) % 60).padStart(2, "0"), days = Math.floor(seconds / 86400);
  return `${days ? `${days} d ` : ""}${Math.floor(seconds / 3600) % 24}:${two(seconds / 60)}:${two(seconds)}`;
}

const lasting = (seconds) => (seconds < 120 ? `${Math.round(seconds)} s` : since(seconds));

const palette = new Map(); // as long as the page is as light or dark as it is

function colour(name) {
  if (!palette.has(name)) palette.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return palette.get(name);
}
