// The curves of a job, drawn by uPlot. As many of them as there are figures, each with as many points as the
// coordinator keeps: nothing here grows.

const HEIGHT = 216, ROWS = 12;
const NEAR = 7, LEAST_BAND = 3; // pixels

// --- one figure ------------------------------------------------------------------------------------------------------

class Figure {
  constructor(curves, name) {
    [this.curves, this.name, this.log, this.rows] = [curves, name, false, []];
    this.value = make("span", {class: "value"});
    this.logs = make("button", {type: "button", "aria-pressed": "false", title: `${name} on a logarithmic scale`}, "log");
    const picture = make("button", {type: "button", title: `${name} as a picture`}, "PNG");
    this.box = make("div", {role: "img", tabindex: "0"});
    this.node = make("figure", {}, make("figcaption", {}, make("strong", {}, name), this.value, this.logs, picture), this.box);
    this.logs.addEventListener("click", () => { this.log = !this.log; set(this.logs, "aria-pressed", this.log); this.build(); this.take(); });
    picture.addEventListener("click", () => this.save());
    this.box.addEventListener("keydown", (event) => this.press(event));
    this.box.addEventListener("blur", () => curves.point(null));
    this.box.addEventListener("wheel", (event) => this.roll(event), {passive: false});
    this.build();
    this.sizes = new ResizeObserver(([{contentRect}]) => {
      if (contentRect.width && Math.round(contentRect.width) !== this.plot.width) this.plot.setSize({width: Math.round(contentRect.width), height: HEIGHT});
    });
    this.sizes.observe(this.box);
  }

  build() {
    if (this.plot) this.plot.destroy();
    const {curves, name} = this, font = "12px system-ui,sans-serif", soft = () => colour("soft");
    const axis = {stroke: soft, font, labelFont: font, labelSize: 20, labelGap: 4, gap: 4};
    const grid = {stroke: () => colour("line"), width: 1}, ticks = {...grid, size: 4};
    const stepped = name === WORKERS ? {paths: uPlot.paths.stepped({align: 1})} : {};
    const line = (options) => ({points: {show: false}, ...stepped, ...options});
    const drag = (plot, target, handle) => (event) => (event.shiftKey ? this.drag(event) : handle(event));
    this.plot = new uPlot({
      width: this.box.clientWidth || 400, height: HEIGHT, legend: {show: false}, padding: [8, 12, 0, 0],
      cursor: {y: false, drag: {setScale: false, dist: 4}, bind: {mousedown: drag, dblclick: () => () => curves.zoom(null)}},
      scales: {x: {time: false}, y: {distr: this.log ? 3 : 1, range: (plot, low, high) => this.span(low, high)}},
      axes: [
        {
          ...axis, grid: {show: false}, ticks, size: 24, space: () => (curves.byTime ? 80 : 55), label: () => (curves.byTime ? "time since the start" : "step"),
          incrs: () => (curves.byTime ? SECONDS : STEPS), values: (plot, splits, which, space, apart) => splits.map((x) => (curves.byTime ? since(x) : tick(x, apart))),
        },
        {
          ...axis, grid, ticks, label: UNITS[name] || name, size: (plot, values, which, cycle) => this.room(values, cycle), space: 32,
          ...(this.log ? {} : {incrs: name === WORKERS ? STEPS : NUMBERS}),
          values: (plot, splits, which, space, apart) => splits.map((y) => (y === null ? "" : this.log ? amount(y) : tick(y, apart))),
        },
      ],
      series: [
        {}, line({stroke: () => colour("ink"), alpha: 0.35, width: 1}),
        line({stroke: () => colour("ink"), width: 2, points: {show: true, size: 4, fill: () => colour("ink"), filter: (plot, place, shown, gaps) => this.alone(gaps)}}),
        line({stroke: soft, width: 1.5, dash: [6, 4]}),
      ],
      hooks: {drawAxes: [(plot) => this.mark(plot)], setSelect: [(plot) => this.select(plot)], setCursor: [(plot) => this.hover(plot)]},
    }, [[], [], [], []], this.box);
  }

  // From the marks of an axis to its title.
  room(values, cycle) {
    const axis = this.plot ? this.plot.axes[1] : null;
    if (!axis || !values) return 40;
    if (cycle > 1) return axis._size;
    this.plot.ctx.font = axis.font[0];
    return Math.ceil(14 + Math.max(0, ...values.map((text) => this.plot.ctx.measureText(text).width)) / uPlot.pxRatio);
  }

  span(low, high) {
    if (low === null) return this.log ? [0.1, 1] : [0, 1];
    if (this.log) return uPlot.rangeLog(low, high, 10, false);
    const bottom = this.name in UNITS ? 0 : low, room = (high - bottom) * 0.06 || Math.abs(high) * 0.06 || 1;
    return [bottom === 0 && low >= 0 ? 0 : bottom - room, high + room];
  }

  // A point between two breaks is no line, and is to be seen all the same.
  alone() {
    const values = this.plot.data[2], found = [];
    const there = (place) => typeof values[place] === "number";
    values.forEach((value, place) => {
      if (!there(place)) return;
      const next = (by) => { let at = place + by; while (values[at] === undefined && at >= 0 && at < values.length) at += by; return at; };
      if (!there(next(-1)) && !there(next(1))) found.push(place);
    });
    return found;
  }

  take() {
    const {curves, name} = this, {run, under} = curves;
    this.rows = drawn(run, name, curves);
    const positive = (value) => (this.log && typeof value === "number" && value <= 0 ? null : value);
    const own = [0, 2, 3].map((column) => this.rows.map((row) => (column ? positive(row[column]) : row[0])));
    const below = under && under.columns.has(name) ? drawn(under, name, {...curves, changes: under.changes}) : [];
    const joined = below.length ? uPlot.join([own, [below.map((row) => row[0]), below.map((row) => positive(row[3]))]], [[0, 2, 2], [0, 2]]) : [...own, own[0].map(() => undefined)];
    const [min, max] = curves.range;
    this.plot.batch(() => { this.plot.setData(joined, false); this.plot.setScale("x", {min, max}); });
    const known = this.rows.map((row) => row[3]).filter((value) => typeof value === "number");
    const span = known.length ? `from ${amount(Math.min(...known))} to ${amount(Math.max(...known))}, lately ${amount(known[known.length - 1])}` : "no figures yet";
    const [first, last] = run.steps.length ? [run.steps[0], run.steps[run.steps.length - 1]] : [0, 0];
    set(this.box, "aria-label", `${name} over steps ${first} to ${last}: ${span}. Arrow keys go from point to point, plus and minus zoom, Shift and an arrow key moves.`);
    this.tell();
  }

  nearest(x) {
    let found = null;
    for (const row of this.rows) if (typeof row[3] === "number" && (!found || Math.abs(row[0] - x) <= Math.abs(found[0] - x))) found = row;
    return found;
  }

  // The latest figure, or the one that is pointed at.
  tell() {
    const {at} = this.curves, latest = this.curves.metrics[this.name];
    const row = this.nearest(at === null ? Infinity : at) || this.rows.findLast((one) => typeof one[3] === "number");
    const odd = at === null && typeof latest === "string";
    write(this.value, odd ? this.notFinite(latest) : !row ? "no figure yet" : shownOf(this.name, row[3]) + (at === null ? "" : ` at step ${grouped.format(row[1])}`));
    set(this.value, "class", odd ? "value bad" : "value");
    const left = at === null ? -10 : this.plot.valToPos(at, "x");
    if (this.plot.cursor.left !== left) this.plot.setCursor({left, top: at === null ? -10 : 10}, false);
  }

  notFinite(value) {
    const {nonFinite} = this.curves;
    return nonFinite && nonFinite.metric === this.name ? `${value} since step ${grouped.format(nonFinite.step)}` : value;
  }

  hover(plot) {
    if (!plot.cursor.event || document.activeElement === this.box && !this.box.matches(":hover")) return;
    if (plot.cursor.left < 0) this.curves.point(null);
    else this.curves.point(plot.posToVal(plot.cursor.left, "x"), this);
  }

  select(plot) {
    const {left, width} = plot.select;
    if (width < 2) return;
    const range = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
    plot.setSelect({left: 0, top: 0, width: 0, height: 0}, false);
    this.curves.zoom(range);
  }

  drag(event) {
    let from = event.clientX;
    const move = (moved) => { this.curves.pan((from - moved.clientX) / this.plot.over.clientWidth); from = moved.clientX; };
    const end = () => document.removeEventListener("mousemove", move);
    document.addEventListener("mousemove", move);
    document.addEventListener("mouseup", end, {once: true});
  }

  // Ctrl and the wheel (or two fingers) zoom, a wheel to the side or with Shift moves; otherwise the page scrolls.
  roll(event) {
    const aside = event.shiftKey ? event.deltaY || event.deltaX : Math.abs(event.deltaX) > Math.abs(event.deltaY) ? event.deltaX : 0;
    if (!event.ctrlKey && !(aside && this.curves.zoomed)) return;
    event.preventDefault();
    if (event.ctrlKey) this.curves.scale(event.deltaY > 0 ? 1.25 : 0.8, this.curves.at);
    else this.curves.pan(Math.sign(aside) * 0.1);
  }

  press(event) {
    const {curves} = this, points = this.rows.filter((row) => typeof row[3] === "number"), last = points.length - 1;
    if (["+", "=", "-", "0", "Escape"].includes(event.key)) {
      if (event.key === "-") curves.scale(2, curves.at);
      else if (event.key === "+" || event.key === "=") curves.scale(0.5, curves.at);
      else curves.zoom(null);
      return;
    }
    const by = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!by && !["Home", "End"].includes(event.key)) return;
    event.preventDefault();
    if (event.shiftKey && by) { curves.pan(0.1 * by); return; }
    if (last < 0) return;
    const here = curves.at === null ? last : points.indexOf(this.nearest(curves.at));
    curves.point(points[by ? Math.max(0, Math.min(last, here + by)) : event.key === "Home" ? 0 : last][0], this);
  }

  // Breaks, changes and what is not finite, behind the curve.
  mark(plot) {
    const {ctx, bbox} = plot, {curves} = this, dense = uPlot.pxRatio, x = (value) => plot.valToPos(value, "x", true);
    const upright = (at, stroke, dash) => {
      ctx.strokeStyle = stroke;
      ctx.setLineDash(dash.map((length) => length * dense));
      ctx.beginPath();
      ctx.moveTo(at, bbox.top);
      ctx.lineTo(at, bbox.top + bbox.height);
      ctx.stroke();
    };
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    for (const band of curves.bands) {
      const from = x(band.from), wide = Math.max(x(band.to) - from, LEAST_BAND * dense);
      ctx.fillStyle = colour(band.kind);
      ctx.globalAlpha = 0.22;
      ctx.fillRect(from, bbox.top, wide, bbox.height);
    }
    ctx.globalAlpha = 0.8;
    ctx.lineWidth = 1.25 * dense;
    for (const one of curves.lines) upright(x(one.x), colour(one.kind), []);
    const {nonFinite} = curves;
    if (nonFinite && nonFinite.metric === this.name && curves.run.steps.length) {
      const at = x(curves.place(nonFinite.step));
      ctx.globalAlpha = 1;
      upright(at, colour("loss"), [4, 3]);
      ctx.fillStyle = colour("loss");
      ctx.font = `bold ${12 * dense}px system-ui,sans-serif`;
      ctx.textBaseline = "top";
      ctx.textAlign = at > bbox.left + bbox.width / 2 ? "right" : "left";
      ctx.fillText(`${nonFinite.value} in step ${nonFinite.step}`, at + (ctx.textAlign === "left" ? 5 : -5) * dense, bbox.top + 4 * dense);
    }
    ctx.restore();
  }

  save() {
    const from = this.plot.ctx.canvas, dense = uPlot.pxRatio, head = 26 * dense, to = make("canvas", {width: from.width, height: from.height + head});
    const ctx = to.getContext("2d");
    ctx.fillStyle = colour("ground");
    ctx.fillRect(0, 0, to.width, to.height);
    ctx.fillStyle = colour("text");
    ctx.font = `bold ${14 * dense}px system-ui,sans-serif`;
    ctx.fillText(`${this.curves.name}: ${this.name}`, 8 * dense, 18 * dense);
    ctx.drawImage(from, 0, head);
    to.toBlob((blob) => download(`${this.curves.name}-${this.name}.png`, blob));
  }

  close() {
    this.sizes.disconnect();
    this.plot.destroy();
    this.node.remove();
  }
}

function download(name, blob) {
  const link = make("a", {href: URL.createObjectURL(blob), download: name.replace(/[^\p{L}\p{N}.-]+/gu, "_")});
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

// --- all of them -----------------------------------------------------------------------------------------------------

class Curves {
  constructor(root, name) {
    this.name = name;
    Object.assign(this, {figures: new Map(), run: null, under: null, changes: [], metrics: {}, nonFinite: null, weight: 0, byTime: false});
    Object.assign(this, {zoomed: null, at: null, bands: [], lines: []});
    const button = (text, label, press) => {
      const node = make("button", {type: "button", "aria-label": label, title: label}, text);
      node.addEventListener("click", press);
      return node;
    };
    const axis = make("select", {"aria-label": "What the curves are over"}, make("option", {value: ""}, "over steps"), make("option", {value: "time"}, "over time"));
    axis.addEventListener("change", () => { [this.byTime, this.zoomed, this.at] = [axis.value === "time", null, null]; this.draw(); });
    const weight = make("input", {type: "range", min: "0", max: "0.99", step: "0.01", value: "0"});
    weight.addEventListener("input", () => { this.weight = Number(weight.value); this.draw(); });
    const file = make("input", {type: "file", accept: ".json,.html"});
    file.addEventListener("change", () => this.lay(file.files[0]));
    this.remove = button("Remove it", "Take the run away that is laid under", () => { [this.under, file.value] = [null, ""]; this.say(""); this.draw(); });
    const tools = make(
      "div", {class: "tools", role: "group", "aria-label": "Curves"}, axis, make("label", {}, "Smoothing ", weight),
      make("span", {}, button("−", "Zoom out", () => this.scale(2, null)), button("+", "Zoom in", () => this.scale(0.5, null)),
        button("‹", "Move to the left", () => this.pan(-0.25)), button("›", "Move to the right", () => this.pan(0.25)), button("All", "Show all", () => this.zoom(null))),
      button("CSV", "All curves as a table for a spreadsheet", () => this.export()),
      make("label", {class: "file"}, "Lay a report's run under it ", file), this.remove,
    );
    this.said = make("p", {role: "status", hidden: ""});
    this.legend = make("ul", {class: "legend", "aria-label": "Legend"});
    this.grid = make("div", {class: "charts"});
    this.tip = make("div", {class: "tip", role: "status", hidden: ""});
    this.heads = make("tr", {});
    this.body = make("tbody", {});
    const table = make("table", {}, make("thead", {}, this.heads), this.body);
    const wide = make("div", {class: "wide", tabindex: "0", role: "region", "aria-label": "Figures over the steps"}, table);
    root.append(tools, this.said, this.legend, this.grid, make("details", {}, make("summary", {}, "The same as a table"), wide));
    document.addEventListener("dragover", (event) => event.preventDefault());
    document.addEventListener("drop", (event) => { event.preventDefault(); this.lay(event.dataTransfer.files[0]); });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { palette.clear(); this.draw(); });
  }

  // Draw what is told: figures, changes, what is not finite, and of a job that runs where it is now.
  take({series, changes, nonFinite, live}) {
    this.run = runOf(series, live);
    [this.changes, this.nonFinite, this.metrics] = [changes, nonFinite, live ? live.metrics : {}];
    this.draw();
  }

  get range() {
    if (this.zoomed) return this.zoomed;
    const ends = [];
    for (const run of this.under ? [this.run, this.under] : [this.run]) {
      const known = (this.byTime ? [...run.times, ...run.breaks.map((one) => one.until)] : run.steps).filter((x) => typeof x === "number");
      if (known.length) ends.push(Math.min(...known), Math.max(...known));
    }
    const [low, high] = ends.length ? [Math.min(...ends), Math.max(...ends)] : [0, 1];
    return high > low ? [low, high] : [low, low + 1];
  }

  draw() {
    if (!this.run) return;
    const {run, byTime} = this;
    this.place = placer(run, byTime);
    this.bands = run.breaks.map((one) => ({
      ...one, from: byTime ? one.since : one.before, to: byTime ? one.until : one.step, kind: one.unheard ? "away" : "pause",
    }));
    const first = run.steps.length ? run.steps[0] : 0;
    this.lines = this.changes.filter((change) => change.step >= first).map((change) => ({change, x: this.place(change.step), kind: change.kind}));
    const names = [...new Set([...run.columns.keys(), ...(this.under ? this.under.columns.keys() : [])])];
    for (const [name, figure] of this.figures) {
      if (names.includes(name)) continue;
      figure.close();
      this.figures.delete(name);
    }
    names.forEach((name, place) => {
      if (!this.figures.has(name)) {
        this.figures.set(name, new Figure(this, name));
      }
      const {node} = this.figures.get(name);
      if (this.grid.children[place] !== node) this.grid.insertBefore(node, this.grid.children[place] || null);
      this.figures.get(name).take();
    });
    this.remove.hidden = !this.under;
    const kinds = new Set([...this.lines, ...this.bands].map((one) => one.kind));
    if (this.nonFinite) kinds.add("nan");
    if (this.under) kinds.add("under");
    fit(this.legend, Object.keys(KINDS).filter((kind) => kinds.has(kind)), () => make("li", {}, make("i", {}), make("span", {})), (node, kind) => {
      set(node.firstChild, "class", kind);
      write(node.lastChild, kind === "under" ? `${KINDS.under}: ${this.under.name}` : KINDS[kind]);
    });
    this.list();
  }

  list() {
    const {steps, times, columns} = this.run, many = Math.min(ROWS, steps.length);
    const places = Array.from({length: many}, (_, row) => Math.round((row * (steps.length - 1)) / Math.max(1, many - 1)));
    const cell = (value) => (typeof value === "number" ? amount(value) : "");
    fit(this.heads, ["Step", "Time", ...columns.keys()], () => make("th", {scope: "col", class: "number"}), write);
    fit(this.body, places, () => make("tr", {}), (line, place) => {
      const time = typeof times[place] === "number" ? since(times[place]) : "";
      fit(line, [grouped.format(steps[place]), time, ...[...columns.values()].map((values) => cell(values[place]))], () => make("td", {class: "number"}), write);
    });
  }

  zoom(range) {
    if (!this.run) return;
    this.zoomed = null;
    const [low, high] = this.range;
    if (range) {
      const wide = Math.min(Math.max(range[1] - range[0], this.byTime ? 1 : 2), high - low);
      const from = Math.min(Math.max(range[0], low), high - wide);
      this.zoomed = wide < high - low ? [from, from + wide] : null;
    }
    this.draw();
  }

  scale(factor, around) {
    if (!this.run) return;
    const [low, high] = this.range, centre = around ?? (low + high) / 2;
    this.zoom([centre - (centre - low) * factor, centre + (high - centre) * factor]);
  }

  pan(share) {
    if (!this.zoomed) return;
    const [low, high] = this.zoomed, by = (high - low) * share;
    this.zoom([low + by, high + by]);
  }

  // All figures tell of one place; the tip is at the figure that is pointed at.
  point(x, figure) {
    if (!this.run) return;
    this.at = x;
    for (const one of this.figures.values()) one.tell();
    this.tip.hidden = x === null;
    if (x === null) return;
    const {plot, node} = figure, left = plot.valToPos(x, "x"), row = figure.nearest(x);
    const parts = row ? [this.moment(row)] : [];
    const near = this.lines.filter((one) => Math.abs(plot.valToPos(one.x, "x") - left) <= NEAR);
    parts.push(...near.slice(-3).map((one) => one.change.said));
    for (const band of this.bands) {
      if (plot.valToPos(band.from, "x") > left + LEAST_BAND || plot.valToPos(band.to, "x") < left - LEAST_BAND) continue;
      const long = lasting(band.until - band.since);
      parts.push(band.unheard ? `No news for ${long}: the coordinator was away.` : `Nobody completed a step for ${long}.`);
    }
    if (this.tip.parentElement !== node) node.append(this.tip);
    fit(this.tip, parts, () => make("p", {}), write);
    const edge = plot.over.offsetLeft + left, right = left > plot.over.clientWidth / 2;
    this.tip.style.left = right ? "auto" : `${edge + 24}px`;
    this.tip.style.right = right ? `${node.clientWidth - edge}px` : "auto";
  }

  moment(row) {
    const place = this.run.steps.indexOf(row[1]), time = place < 0 ? null : this.run.times[place];
    if (typeof time !== "number") return `Step ${grouped.format(row[1])}`;
    return `Step ${grouped.format(row[1])}, ${since(time)} after the start, at ${clock.format(new Date(1000 * (this.run.began + time)))}`;
  }

  export() {
    if (!this.run) return;
    const {began, steps, times, columns} = this.run, quote = (text) => `"${text.replaceAll('"', '""')}"`;
    const date = (time) => (typeof time === "number" ? new Date(1000 * (began + time)).toISOString() : "");
    const lines = steps.map((step, place) => [step, date(times[place]), ...[...columns.values()].map((values) => values[place] ?? "")].join(","));
    const text = [["step", "time", ...columns.keys()].map(quote).join(","), ...lines].join("\n");
    download(`${this.name}.csv`, new Blob([`${text}\n`], {type: "text/csv"}));
  }

  say(sentence) {
    this.said.hidden = !sentence;
    write(this.said, sentence);
  }

  // A report as JSON, or the page that was made of it, of another run.
  async lay(file) {
    if (!file) return;
    let text = await file.text();
    if (/^\s*</.test(text)) text = new DOMParser().parseFromString(text, "text/html").getElementById("run")?.textContent ?? "";
    try {
      const {job, series, changes} = JSON.parse(text), run = runOf(series, null);
      if (!run.steps.length || !run.steps.every(Number.isFinite)) throw new TypeError("it has no steps");
      this.under = {...run, name: String(job), changes: changes || []};
      this.say("");
    } catch {
      this.say(`${file.name} has no curves: choose what virtualflow run --report or virtualflow report has written.`);
    }
    this.draw();
  }
}
