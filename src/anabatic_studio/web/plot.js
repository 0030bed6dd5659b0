// One plot: lines over a common horizontal axis as SVG, with a cursor for pointer, finger and keys.

const svg = (name, attributes = {}, ...children) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
};

const short = (value) => {
  if (Math.abs(value) >= 1e15) return String(Number(value.toPrecision(3)).toExponential());
  for (const [unit, size] of [["T", 1e12], ["B", 1e9], ["M", 1e6], ["K", 1e3]]) {
    if (Math.abs(value) >= size) return `${+(value / size).toPrecision(3)}${unit}`;
  }
  return String(+value.toPrecision(3));
};

// Round values between two numbers, about `most` of them; of a logarithmic axis 1, 2 and 5 of each power of ten.
const ticks = (low, high, most, log) => {
  if (log) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) {
      for (const one of [1, 2, 5]) { const value = one * 10 ** power; if (value >= low && value <= high) found.push(value); }
    }
    if (found.length > 1) return found.length > 2 * most ? found.filter((one) => /^1e|^10*$|^0\.0*1$/.test(String(one))) : found;
  }
  const rough = (high - low) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const stride = power * [1, 2, 5, 10].find((one) => one * power >= rough * 0.999);
  const found = [];
  for (let at = Math.ceil(low / stride - 1e-9); at * stride <= high + stride * 1e-9 && found.length < 60; at += 1) found.push(at * stride);
  return found;
};

const quantile = (sorted, share) => sorted[Math.min(sorted.length - 1, Math.max(0, Math.round(share * (sorted.length - 1))))];

// From where to where: all of the lines, but of what is measured and faint only what is not far out.
const range = (series, zero, log) => {
  const sure = series.filter((one) => one.style !== "raw").flatMap((one) => one.y);
  const rough = series.filter((one) => one.style === "raw").flatMap((one) => one.y);
  const known = (values) => values.filter((one) => one !== null && (!log || one > 0)).sort((a, b) => a - b);
  const [a, b] = [known(sure), known(rough)];
  const all = [...(a.length ? [a[0], a.at(-1)] : []), ...(b.length ? [quantile(b, 0.01), quantile(b, 0.99)] : [])];
  if (!all.length) return null;
  let [low, high] = [Math.min(...all), Math.max(...all)];
  if (zero && !log) { low = Math.min(low, 0); high = Math.max(high, 0); }
  if (low === high) { low -= Math.abs(low) / 10 || 1; high += Math.abs(high) / 10 || 1; }
  const room = log ? 0 : (high - low) * 0.04;
  return [zero && low === 0 ? 0 : low - room, high + room];
};

const nearest = (values, wanted) => {
  let low = 0;
  let high = values.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (values[middle] < wanted) low = middle; else high = middle; }
  return Math.abs(values[low] - wanted) <= Math.abs(values[high] - wanted) ? low : high;
};

const EDGE = { left: 62, right: 18, top: 8, bottom: 24 };
const RIM = 4; // around the lines: a point at the border is drawn whole

// `series`: {name, colour, style: raw | line | dots, x: numbers that rise, y: numbers or null}.
class Plot {
  constructor({ title, write, binary, menu }) {
    this.write = write;
    this.binary = binary; // bytes: round values are those of KiB, MiB, GiB
    this.series = [];
    this.at = null;
    this.title = word(title);
    this.last = node("b", {});
    this.head = node("figcaption", {}, node("span", {}, this.title), this.last, ...(menu ? [menu(this)] : []));
    this.box = svg("svg", { tabindex: "0", role: "img" });
    this.tip = node("div", { class: "tip", hidden: "" });
    this.node = node("figure", { class: "plot" }, this.head, this.box, this.tip);
    this.box.addEventListener("pointermove", (event) => this.point(this.value(event.clientX - this.box.getBoundingClientRect().left)));
    this.box.addEventListener("pointerleave", () => this.point(null));
    this.box.addEventListener("blur", () => this.point(null));
    this.box.addEventListener("keydown", (event) => this.key(event));
  }

  draw(series, { zero, log, axis, marks = [] }) {
    this.marks = marks;
    this.series = series.filter((one) => one.y.some((value) => value !== null));
    this.node.hidden = !this.series.length;
    if (!this.series.length) return;
    const positive = this.series.every((one) => one.y.every((value) => value === null || value > 0));
    this.log = log && positive;
    this.axis = axis;
    const xs = this.series.flatMap((one) => [one.x[0], one.x.at(-1)]);
    this.x = [Math.min(...xs), Math.max(...xs)];
    if (this.x[0] === this.x[1]) this.x = [this.x[0] - 0.5, this.x[1] + 0.5];
    this.y = range(this.series, zero, this.log);
    const lead = this.series.find((one) => one.style === "line") ?? this.series[0];
    const final = lead.y.findLast((value) => value !== null);
    this.last.textContent = this.series.some((one) => one.owner !== lead.owner) ? "" : this.write(final);
    const names = this.series.map((one) => `${one.name} ${this.write(one.y.findLast((value) => value !== null))}`);
    this.box.setAttribute("aria-label", `${this.title}: ${[...names, ...(marks.length ? [word("numSpikes", marks.length)] : [])].join(", ")}`);
    this.paint();
  }

  paint() {
    this.width = Math.max(160, this.node.clientWidth);
    this.height = this.node.classList.contains("large") ? 280 : 190;
    for (const [name, value] of Object.entries({ width: this.width, height: this.height, viewBox: `0 0 ${this.width} ${this.height}` })) this.box.setAttribute(name, value);
    this.cursor = svg("line", { class: "cursor", y1: EDGE.top, y2: this.height - EDGE.bottom, visibility: "hidden" });
    this.box.replaceChildren(...this.contents(), this.cursor);
    this.point(this.at);
  }

  // The contents in another size, for a file.
  compose(width, height) {
    const shown = [this.width, this.height];
    [this.width, this.height] = [width, height];
    try { return this.contents(); } finally { [this.width, this.height] = shown; }
  }

  contents() {
    const grid = svg("g", { class: "grid" });
    const unit = this.binary ? 1024 ** Math.floor(Math.log(Math.max(1, this.y[1])) / Math.log(1024)) : 1;
    for (const value of ticks(this.y[0] / unit, this.y[1] / unit, 5, this.log).map((one) => one * unit)) {
      const y = this.down(value);
      grid.append(svg("line", { x1: EDGE.left, x2: this.width - EDGE.right, y1: y, y2: y }), svg("text", { x: EDGE.left - 6, y: y + 4, "text-anchor": "end" }, this.write(value)));
    }
    for (const value of ticks(...this.x, Math.max(2, Math.floor(this.width / 75)), false)) {
      grid.append(svg("text", { x: this.across(value), y: this.height - 6, "text-anchor": "middle" }, short(value)));
    }
    const [x, y] = [EDGE.left - RIM, EDGE.top - RIM];
    const [width, height] = [this.width - EDGE.left - EDGE.right + 2 * RIM, this.height - EDGE.top - EDGE.bottom + 2 * RIM];
    const inner = svg("svg", { x, y, width, height, viewBox: `${x} ${y} ${width} ${height}` });
    for (const one of this.series) inner.append(...this.lines(one));
    for (const mark of this.marks ?? []) {
      const x = this.across(mark.x);
      inner.append(svg("line", { class: mark.colour ? `mark c${mark.colour}` : "mark", x1: x, x2: x, y1: EDGE.top, y2: this.height - EDGE.bottom }, svg("title", {}, mark.text)));
    }
    return [grid, inner];
  }

  lines({ x, y, colour, style }) {
    let path = "";
    let pen = "M";
    const dots = [];
    x.forEach((value, at) => {
      if (y[at] === null) { pen = "M"; return; }
      const [a, b] = [this.across(value).toFixed(1), this.down(y[at]).toFixed(1)];
      path += `${pen}${a} ${b}`;
      pen = "L";
      if (x.length === 1 || (style === "dots" && x.length <= 60)) dots.push(svg("circle", { cx: a, cy: b, r: 2.6, class: `c${colour}` }));
    });
    return [svg("path", { d: path, class: `c${colour} ${style}` }), ...dots];
  }

  across(value) { return EDGE.left + ((value - this.x[0]) / (this.x[1] - this.x[0])) * (this.width - EDGE.left - EDGE.right); }

  down(value) {
    const of = (one) => (this.log ? Math.log10(one) : one);
    const share = (of(value) - of(this.y[0])) / (of(this.y[1]) - of(this.y[0]));
    return this.height - EDGE.bottom - Math.min(20, Math.max(-20, share)) * (this.height - EDGE.top - EDGE.bottom);
  }

  value(left) { return this.x[0] + ((left - EDGE.left) / (this.width - EDGE.left - EDGE.right)) * (this.x[1] - this.x[0]); }

  // The values at a place of the horizontal axis; null: none.
  point(at) {
    this.at = at;
    this.tip.hidden = at === null;
    this.cursor?.setAttribute("visibility", at === null ? "hidden" : "visible");
    if (at === null) return;
    const lead = this.series.reduce((a, b) => (b.x.length > a.x.length ? b : a));
    const here = lead.x[nearest(lead.x, at)];
    const left = this.across(here);
    this.cursor.setAttribute("x1", left);
    this.cursor.setAttribute("x2", left);
    const rows = this.series.filter((one) => one.style !== "raw" || !this.series.some((other) => other.owner === one.owner && other.style === "line"))
      .map((one) => [one, nearest(one.x, here)]).filter(([one, index]) => Math.abs(this.across(one.x[index]) - left) < 30 && one.y[index] !== null);
    this.tip.replaceChildren(node("b", {}, `${word(this.axis)} ${this.axis === "hours" ? here.toFixed(2) : Math.round(here).toLocaleString("en")}`),
      ...rows.map(([one, index]) => node("span", {}, node("i", { class: `c${one.colour} ${one.style}` }), node("span", {}, one.name), node("b", {}, this.write(one.y[index])))));
    const near = (this.marks ?? []).filter((each) => Math.abs(this.across(each.x) - left) < 8).slice(0, 3);
    this.tip.append(...near.map((mark) => node("span", { class: mark.colour ? "" : "bad" }, ...(mark.colour ? [node("i", { class: `c${mark.colour} line` })] : []), node("span", {}, mark.text))));
    const wide = this.tip.offsetWidth;
    this.tip.style.left = `${Math.max(0, Math.min(this.width - wide, left + 12 + wide > this.width ? left - 12 - wide : left + 12))}px`;
  }

  key(event) {
    const lead = this.series.reduce((a, b) => (b.x.length > a.x.length ? b : a));
    const stride = Math.max(1, Math.round(lead.x.length / 50));
    const now = this.at === null ? lead.x.length - 1 : nearest(lead.x, this.at);
    const moves = { ArrowLeft: now - stride, ArrowRight: now + stride, Home: 0, End: lead.x.length - 1 };
    if (event.key === "Escape") this.point(null);
    if (!(event.key in moves)) return;
    event.preventDefault();
    this.point(lead.x[Math.max(0, Math.min(lead.x.length - 1, moves[event.key]))]);
  }
}
