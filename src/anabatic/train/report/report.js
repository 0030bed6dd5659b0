"use strict";
const root = document.documentElement;
root.classList.add("js");

/* The reader's language: chosen here before, else the browser's first that the page has, else the page's own. */
const LANGUAGES = ["en", "zh"];
const words = JSON.parse(document.getElementById("texts").textContent);
const KEPT = "anabatic.settings"; // the studio and the chat page keep theirs here too
const kept = () => {
  try { return JSON.parse(localStorage.getItem(KEPT)) ?? {}; } catch { return {}; } // no storage, or not ours
};
const keep = (code) => {
  try { localStorage.setItem(KEPT, JSON.stringify({ ...kept(), language: code })); return true; } catch { return false; }
};
const wished = [kept().language, ...navigator.languages.map((code) => code.toLowerCase().split("-")[0]), root.lang];
let language = wished.find((code) => LANGUAGES.includes(code));
const side = () => LANGUAGES.indexOf(language);
const ATTRIBUTES = ["aria-label", "data-label"];
const switches = [...document.querySelectorAll(".languages button")];
const translate = () => {
  root.lang = language;
  for (const element of document.querySelectorAll("[data-text]")) {
    element.textContent = words.texts[element.dataset.text][side()];
  }
  for (const name of ATTRIBUTES) {
    for (const element of document.querySelectorAll(`[data-text-${name}]`)) {
      element.setAttribute(name, words.texts[element.getAttribute(`data-text-${name}`)][side()]);
    }
  }
  for (const button of switches) button.setAttribute("aria-pressed", String(button.lang === language));
};
translate();
for (const button of switches) button.addEventListener("click", () => { language = button.lang; keep(language); translate(); });

/* Charts: a vertical cursor, a dot on each curve and the values, by pointer, finger or arrow keys. */
for (const plot of document.querySelectorAll(".plot")) {
  const series = JSON.parse(plot.querySelector("script").textContent).series;
  const steps = new Map();
  for (const one of series) one.step.forEach((step, i) => steps.set(step, one.x[i]));
  const all = [...steps].sort((a, b) => a[0] - b[0]);
  if (!all.length) continue;

  const add = (parent, kind, name) => {
    const element = document.createElement(kind);
    element.className = name;
    parent.append(element);
    return element;
  };
  const cursor = add(plot, "div", "cursor");
  const dots = series.map((one) => add(plot, "div", "dot c" + one.colour + " " + one.style));
  const tip = add(plot, "div", "tip");
  let at = all.length - 1;

  const nearest = (values, wanted) => {
    let low = 0, high = values.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (values[middle] < wanted) low = middle; else high = middle;
    }
    return Math.abs(values[low] - wanted) <= Math.abs(values[high] - wanted) ? low : high;
  };
  const positions = all.map((pair) => pair[1]);

  const show = (index) => {
    at = Math.max(0, Math.min(all.length - 1, index));
    const [step, x] = all[at];
    tip.replaceChildren();
    add(tip, "b", "").textContent = words.step[side()].replace("{step}", step.toLocaleString("en"));
    series.forEach((one, k) => {
      const i = nearest(one.x, x);
      const near = one.x.length > 0 && Math.abs(one.x[i] - x) < 1;
      dots[k].hidden = !near;
      if (!near) return;
      dots[k].style.left = one.x[i] + "%";
      dots[k].style.top = one.y[i] + "%";
      const row = add(tip, "span", "c" + one.colour + " " + one.style);
      add(row, "i", "");
      add(row, "span", "").textContent = one.name[side()];
      add(row, "b", "").textContent = one.text[i];
    });
    cursor.style.left = x + "%";
    plot.classList.add("live");
    const room = plot.clientWidth, width = tip.offsetWidth, here = (x / 100) * room;
    const wanted = here + 14 + width > room ? here - 14 - width : here + 14;
    tip.style.left = Math.max(0, Math.min(room - width, wanted)) + "px";
  };
  const hide = () => plot.classList.remove("live");

  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    show(nearest(positions, (100 * (event.clientX - box.left)) / box.width));
  });
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("focus", () => plot.matches(":focus-visible") && show(at));
  plot.addEventListener("blur", hide);
  const stride = Math.max(1, Math.round(all.length / 50));
  const keys = { ArrowLeft: -stride, ArrowRight: stride, Home: -all.length, End: all.length };
  plot.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hide();
    if (!(event.key in keys)) return;
    event.preventDefault();
    show(at + keys[event.key]);
  });
}

/* Samples: one moment at a time. */
for (const sample of document.querySelectorAll(".sample")) {
  const buttons = [...sample.querySelectorAll("button")];
  const texts = [...sample.querySelectorAll(".texts > div")];
  buttons.forEach((button, i) => button.addEventListener("click", () => {
    buttons.forEach((other, k) => other.setAttribute("aria-pressed", String(k === i)));
    texts.forEach((text, k) => text.classList.toggle("on", k === i));
  }));
}

/* Paper has no folds. */
const folds = [...document.querySelectorAll("details")];
addEventListener("beforeprint", () => folds.forEach((fold) => { fold.dataset.was = fold.open ? "1" : ""; fold.open = true; }));
addEventListener("afterprint", () => folds.forEach((fold) => { fold.open = fold.dataset.was === "1"; }));
