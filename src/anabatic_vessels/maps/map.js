"use strict";
const { vessels, classes } = JSON.parse(document.getElementById("data").textContent);
const canvas = document.querySelector("canvas"), pen = canvas.getContext("2d"), tip = document.querySelector(".tip");
const legend = document.querySelector(".legend"), list = document.querySelector(".list");
const only = document.getElementById("only"), find = document.getElementById("find");
const hidden = new Set();
const mercator = (lat) => Math.log(Math.tan(Math.PI / 4 + Math.max(-85, Math.min(85, lat)) * Math.PI / 360)) * 180 / Math.PI;
const unproject = (y) => Math.atan(Math.sinh(y * Math.PI / 180)) * 180 / Math.PI;
let view = { x: 0, y: 0, scale: 1 }, picked = null, pending = false;

for (const vessel of vessels) {
  vessel.box = [Infinity, Infinity, -Infinity, -Infinity];
  for (const line of vessel.lines) {
    for (const point of line) {
      point[3] = mercator(point[1]);
      vessel.box = [Math.min(vessel.box[0], point[0]), Math.min(vessel.box[1], point[3]),
        Math.max(vessel.box[2], point[0]), Math.max(vessel.box[3], point[3])];
    }
  }
}

const shown = () => vessels.filter((one) => !hidden.has(one.shown) && !(only && only.checked && !one.wrong)
  && one.vessel.toLowerCase().includes(find.value.trim().toLowerCase()));
const at = (x, y) => [(x - view.x) * view.scale + canvas.clientWidth / 2, (view.y - y) * view.scale + canvas.clientHeight / 2];
const place = (px, py) => [(px - canvas.clientWidth / 2) / view.scale + view.x, view.y - (py - canvas.clientHeight / 2) / view.scale];

function fit(boxes) {
  const [left, low, right, high] = boxes.reduce((a, b) => [Math.min(a[0], b[0]), Math.min(a[1], b[1]), Math.max(a[2], b[2]), Math.max(a[3], b[3])],
    [Infinity, Infinity, -Infinity, -Infinity]);
  if (!Number.isFinite(left)) return;
  const width = Math.max(right - left, .004), height = Math.max(high - low, .004);
  view = { x: (left + right) / 2, y: (low + high) / 2, scale: Math.min(canvas.clientWidth / width, canvas.clientHeight / height) * .88 };
  draw();
}

// What lies among the middle 98 %: one vessel on another ocean does not shrink all others.
function most(boxes) {
  const sorted = (place) => boxes.map((box) => (box[place] + box[place + 2]) / 2).sort((a, b) => a - b);
  const rest = Math.floor(boxes.length / 100), within = (list, value) => value >= list[rest] && value <= list[list.length - 1 - rest];
  const x = sorted(0), y = sorted(1);
  return boxes.filter((box) => within(x, (box[0] + box[2]) / 2) && within(y, (box[1] + box[3]) / 2));
}

function draw() {
  if (!pending) requestAnimationFrame(paint);
  pending = true;
}

function paint() {
  pending = false;
  const ratio = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  grid(width, height);
  const now = shown();
  for (const vessel of now) if (vessel !== picked) track(vessel, 1.4, .8);
  for (const vessel of now) mark(vessel);
  if (picked) { track(picked, 4, 1); mark(picked); }
  ruler();
}

function track(vessel, width, alpha) {
  const [x0, y1] = at(vessel.box[0], vessel.box[1]), [x1, y0] = at(vessel.box[2], vessel.box[3]);
  if (x1 < 0 || y1 < 0 || x0 > canvas.clientWidth || y0 > canvas.clientHeight) return;
  pen.strokeStyle = classes[vessel.shown];
  pen.lineWidth = width;
  pen.globalAlpha = alpha;
  pen.lineJoin = "round";
  pen.beginPath();
  for (const line of vessel.lines) line.forEach((point, index) => {
    const [x, y] = at(point[0], point[3]);
    if (index) pen.lineTo(x, y); else pen.moveTo(x, y);
  });
  pen.stroke();
  pen.globalAlpha = 1;
}

function mark(vessel) {
  const point = vessel.lines.at(-1).at(-1), [x, y] = at(point[0], point[3]);
  if (x < -9 || y < -9 || x > canvas.clientWidth + 9 || y > canvas.clientHeight + 9) return;
  pen.fillStyle = classes[vessel.shown];
  pen.beginPath();
  pen.arc(x, y, 3, 0, 7);
  pen.fill();
  if (!vessel.wrong) return;
  pen.strokeStyle = getComputedStyle(document.body).getPropertyValue("--bad");
  pen.lineWidth = 2;
  pen.beginPath();
  for (const [a, b] of [[-1, -1], [-1, 1]]) { pen.moveTo(x + 5 * a, y + 5 * b); pen.lineTo(x - 5 * a, y - 5 * b); }
  pen.stroke();
}

function grid(width, height) {
  const style = getComputedStyle(document.body), step = [60, 30, 20, 10, 5, 2, 1, .5, .2, .1, .05, .02, .01, .005, .002, .001]
    .find((one) => one * view.scale < 180) ?? .001;
  pen.strokeStyle = style.getPropertyValue("--line");
  pen.fillStyle = style.getPropertyValue("--soft");
  pen.font = "11px sans-serif";
  pen.lineWidth = 1;
  const [west, north] = place(0, 0), [east, south] = place(width, height), digits = Math.max(0, Math.ceil(-Math.log10(step)));
  const name = (value, hemispheres) => `${Math.abs(value).toFixed(digits)}° ${value < 0 ? hemispheres[1] : hemispheres[0]}`;
  pen.beginPath();
  for (let lon = Math.ceil(west / step) * step; lon <= east; lon += step) {
    const x = Math.round(at(lon, 0)[0]) + .5;
    pen.moveTo(x, 0); pen.lineTo(x, height);
    pen.fillText(name(lon, "EW"), x + 4, 13);
  }
  for (let lat = Math.max(-80, Math.ceil(unproject(south) / step) * step); lat <= Math.min(84, unproject(north)); lat += step) {
    const y = Math.round(at(0, mercator(lat))[1]) + .5;
    pen.moveTo(0, y); pen.lineTo(width, y);
    pen.fillText(name(lat, "NS"), 4, y - 4);
  }
  pen.stroke();
}

function ruler() {
  const metres = 111320 * Math.cos(unproject(view.y) * Math.PI / 180) / view.scale;
  const wanted = metres * 110, power = 10 ** Math.floor(Math.log10(wanted));
  const length = [5, 2, 1].find((one) => one * power <= wanted) * power, scale = document.querySelector(".scale");
  scale.querySelector("i").style.width = `${length / metres}px`;
  scale.querySelector("span").textContent = length >= 1000 ? `${length / 1000} km` : `${length} m`;
}

function nearest(px, py) {
  const [x, y] = place(px, py), reach = 8 / view.scale;
  let best = null, distance = reach;
  for (const vessel of shown()) {
    const [left, low, right, high] = vessel.box;
    if (x < left - reach || x > right + reach || y < low - reach || y > high + reach) continue;
    for (const line of vessel.lines) for (const point of line) {
      const far = Math.hypot(point[0] - x, point[3] - y);
      if (far < distance) { best = { vessel, point }; distance = far; }
    }
  }
  return best;
}

function told(vessel) {
  const sure = vessel.confidence === null ? "" : ` (${Math.round(100 * vessel.confidence)} %)`;
  if (!vessel.predicted) return vessel.truth || "class unknown";
  return vessel.truth ? `${vessel.truth}, predicted ${vessel.predicted}${sure}` : `predicted ${vessel.predicted}${sure}`;
}

function showTip(event) {
  const box = canvas.getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top;
  const found = nearest(px, py), vessel = found && found.vessel;
  if (vessel !== picked) { picked = vessel; draw(); }
  tip.hidden = !found;
  if (!found) return;
  tip.textContent = `${vessel.vessel}\n${told(vessel)}\n${new Date(found.point[2] * 1000).toISOString().slice(0, 19).replace("T", " ")} UTC`;
  tip.style.left = `${Math.max(0, Math.min(px + 14, canvas.clientWidth - tip.offsetWidth - 6))}px`;
  tip.style.top = `${Math.max(0, Math.min(py + 14, canvas.clientHeight - tip.offsetHeight - 6))}px`;
}

function zoom(by, px = canvas.clientWidth / 2, py = canvas.clientHeight / 2) {
  const [x, y] = place(px, py);
  view.scale = Math.max(.5, Math.min(2e6, view.scale * by));
  const [nx, ny] = place(px, py);
  view.x += x - nx;
  view.y += y - ny;
  draw();
}

function refresh() {
  picked = null;
  list.replaceChildren(...shown().slice(0, 200).map((vessel) => {
    const item = document.createElement("li"), button = document.createElement("button"), small = document.createElement("small");
    item.className = vessel.wrong ? "bad" : "";
    button.type = "button";
    button.textContent = vessel.vessel;
    small.textContent = told(vessel);
    button.append(small);
    button.onclick = () => { picked = vessel; fit([vessel.box]); };
    item.append(button);
    return item;
  }));
  draw();
}

for (const name of Object.keys(classes)) {
  const own = vessels.filter((one) => one.shown === name), wrong = own.filter((one) => one.wrong).length;
  if (!own.length) continue;
  const item = document.createElement("li"), label = document.createElement("label"), box = document.createElement("input");
  const dot = document.createElement("i"), count = document.createElement("span"), bad = document.createElement("span");
  box.type = "checkbox";
  box.checked = true;
  box.onchange = () => { hidden[box.checked ? "delete" : "add"](name); refresh(); };
  dot.style.background = classes[name];
  count.textContent = own.length;
  bad.className = "wrong";
  bad.textContent = wrong ? `${wrong} wrong` : "";
  label.append(box, dot, name, count, bad);
  item.append(label);
  legend.append(item);
}

let drag = null;
canvas.onpointerdown = (event) => { drag = [event.clientX, event.clientY]; canvas.setPointerCapture(event.pointerId); };
canvas.onpointerup = () => { drag = null; };
canvas.onpointermove = (event) => {
  if (!drag) return showTip(event);
  view.x -= (event.clientX - drag[0]) / view.scale;
  view.y += (event.clientY - drag[1]) / view.scale;
  drag = [event.clientX, event.clientY];
  tip.hidden = true;
  draw();
};
canvas.onpointerleave = () => { tip.hidden = true; };
canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  const box = canvas.getBoundingClientRect();
  zoom(Math.exp(-event.deltaY / 400), event.clientX - box.left, event.clientY - box.top);
}, { passive: false });
canvas.onkeydown = (event) => {
  const move = { ArrowLeft: [-60, 0], ArrowRight: [60, 0], ArrowUp: [0, -60], ArrowDown: [0, 60] }[event.key];
  if (event.key === "+" || event.key === "-") zoom(event.key === "+" ? 1.6 : .625);
  if (!move) return;
  event.preventDefault();
  view.x += move[0] / view.scale;
  view.y -= move[1] / view.scale;
  draw();
};
for (const button of document.querySelectorAll(".zoom button")) {
  button.onclick = () => { if (button.dataset.by === "0") fit(shown().map((one) => one.box)); else zoom(Number(button.dataset.by)); };
}
if (only) only.onchange = refresh;
find.oninput = refresh;
addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
refresh();
fit(most(vessels.map((one) => one.box)));
