// The runs: a list, the curves of the chosen ones, their comparison, and what else the one in front has written.

const MOST = 8;
const RUN_SECONDS = 3;
const QUIET_SECONDS = 10; // where no run trains
const percent = (value) => `${+(100 * value).toPrecision(3)} %`;
const exact = (value) => String(+value.toPrecision(4));
const PLOTS = [
  { title: "loss", keys: ["loss"], valid: "valid_loss", write: exact, log: true },
  { title: "lr", keys: ["lr"], zero: true, write: (value) => (value ? Number(value.toPrecision(3)).toExponential() : "0") },
  { title: "tokens_per_s", keys: ["tokens_per_s"], zero: true, write: short },
  { title: "memory_bytes", keys: ["memory_bytes"], zero: true, write: bytes, binary: true },
  { title: "device_util_pct_mean", keys: ["device_util_pct_mean"], zero: true, write: (value) => `${exact(value)} %` },
  { title: "device_power_w_mean", keys: ["device_power_w_mean"], zero: true, write: (value) => `${exact(value)} W` },
  { title: "grad_norm", keys: ["grad_norm"], zero: true, write: exact, log: true },
  { title: "mfu", keys: ["mfu"], zero: true, write: percent },
  { title: "data_wait", keys: ["data_wait"], zero: true, write: percent },
  { title: "accuracy", keys: ["accuracy"], valid: "valid_accuracy", write: percent },
  { title: "valid_bpb", keys: [], valid: "valid_bpb", write: exact },
  { title: "valid_perplexity", keys: [], valid: "valid_perplexity", write: exact, log: true },
  { title: "rewards", keys: ["rewards/chosen", "rewards/rejected"], write: exact },
];

let listed = [];
let chosen = []; // [{id, colour}]; the last one is in front
let part = "samples";
let about = null;
const held = new Map(); // id -> {version, share, curves}
const rows = new Map(); // id -> its row of the list
let plots = [];

const nameOf = (id) => listed.find((one) => one.id === id)?.name ?? id;
const stateOf = (id) => listed.find((one) => one.id === id)?.state ?? "";
const live = (id) => stateOf(id).startsWith("running");
const front = () => chosen.at(-1)?.id ?? null;

// --- the list

const facts = (one) => {
  const parts = [word("states")[one.state] ?? one.state];
  if (one.step !== null) parts.push(one.steps ? `${one.step} / ${one.steps}` : String(one.step));
  if (one.loss !== null) parts.push(exact(one.loss));
  if (one.eta_s !== null && one.state.startsWith("running")) parts.push(word("left", span(one.eta_s)));
  else if (one.age_s !== null) parts.push(word("ago", span(one.age_s)));
  return parts.join(" · ");
};

// A row is made once and then changed: a list that is drawn anew under the pointer loses the click.
const newRow = (id) => {
  const tick = node("input", { type: "checkbox" });
  tick.addEventListener("change", () => toggle(id, tick.checked));
  const open = node("button", { type: "button", class: "talk" }, node("span", { class: "name" }), node("span", { class: "fine" }));
  open.addEventListener("click", () => { pick([{ id, colour: 1 }]); fold(); });
  return node("li", {}, tick, open, node("i", {}));
};

const changeRow = (one) => {
  if (!rows.has(one.id)) rows.set(one.id, newRow(one.id));
  const row = rows.get(one.id);
  const [tick, open, dot] = row.children;
  const at = chosen.find((each) => each.id === one.id);
  row.className = at ? `c${at.colour}` : "";
  tick.checked = Boolean(at);
  tick.setAttribute("aria-label", word("compare", one.name));
  open.setAttribute("aria-current", String(one.id === front()));
  open.title = one.why || one.name;
  open.children[0].textContent = one.name;
  open.children[1].textContent = [facts(one), ...one.tags.map((tag) => `#${tag}`)].join(" ");
  dot.className = `dot ${one.state.split(" ")[0]}`;
  return row;
};

const matches = (one, wanted) => (wanted.startsWith("#") ? one.tags.some((tag) => tag.toLowerCase().startsWith(wanted.slice(1))) : one.name.toLowerCase().includes(wanted));

const showList = () => {
  const isEmpty = ready && !listed.length;
  $("welcome").hidden = !isEmpty;
  $("run-controls").hidden = isEmpty || view !== "runs";
  const wanted = $("find").value.trim().toLowerCase();
  const shown = listed.filter((one) => matches(one, wanted)).map(changeRow);
  for (const id of rows.keys()) if (!listed.some((one) => one.id === id)) rows.delete(id);
  const there = [...$("list").children];
  if (there.length !== shown.length || there.some((one, at) => one !== shown[at])) $("list").replaceChildren(...shown);
};

const toggle = (id, on) => {
  const rest = chosen.filter((one) => one.id !== id);
  if (on && rest.length >= MOST) { say(word("most"), true); showList(); return; }
  const free = Array.from({ length: MOST }, (_, at) => at + 1).find((one) => rest.every((each) => each.colour !== one));
  pick(on ? [...rest, { id, colour: free }] : rest);
};

const pick = (runs) => {
  const before = front();
  chosen = runs;
  if (view === "runs") history.replaceState(null, "", `#/runs${runs.length ? `/${runs.map((one) => one.id).join(",")}` : ""}`);
  for (const id of held.keys()) if (!runs.some((one) => one.id === id)) held.delete(id);
  if (front() !== before) { about = null; $("about").hidden = true; }
  say("");
  saidUntil = 0;
  showList();
  draw();
  pollNow();
};

// --- the curves

// Steps as places on the chosen axis; those without a known place are left out.
const placed = (curves, [steps, values], axis) => {
  if (axis === "step") return { x: steps, y: values };
  const [known, where] = curves[axis === "hours" ? "time" : "tokens"]?.points ?? [[], []];
  const scale = axis === "hours" ? 3600 : 1;
  const out = { x: [], y: [] };
  let at = 0;
  steps.forEach((step, index) => {
    while (at + 1 < known.length && known[at + 1] <= step) at += 1;
    if (!known.length || known[at] > step || where[at] === null) return;
    const next = known[at + 1] === undefined || where[at + 1] === null ? at : at + 1;
    const share = next === at ? 0 : (step - known[at]) / (known[next] - known[at]);
    const place = (where[at] + share * (where[next] - where[at])) / scale;
    if (out.x.length && place < out.x.at(-1)) return;
    out.x.push(place);
    out.y.push(values[index]);
  });
  return out;
};

const seriesOf = ({ keys, valid }, { id, colour }, alone) => {
  const curves = held.get(id)?.curves ?? {};
  const axis = $("axis").value;
  const add = (key, points, style, tint, name) => (points ? [{ name, owner: id, colour: tint, style, ...placed(curves, points, axis) }] : []);
  const title = (key) => (alone ? WORDS[language][key] : keys.length > 1 ? `${nameOf(id)} · ${word(key)}` : nameOf(id));
  const out = keys.flatMap((key, at) => {
    const curve = curves[key];
    const tint = alone ? 1 + at : colour;
    if (!curve?.smooth || !$("smooth").checked) return add(key, curve?.points, at && !alone ? "dots" : "line", tint, title(key));
    return [...(alone ? add(key, curve.points, "raw", tint, title(key)) : []), ...add(key, curve.smooth, "line", tint, title(key))];
  });
  const label = alone ? word("valid") : `${nameOf(id)} · ${word("valid")}`;
  return [...out, ...(valid ? add(valid, curves[valid]?.points, "dots", alone && keys.length ? 2 : colour, label) : [])].filter((one) => one.x.length);
};

const draw = () => {
  const alone = chosen.length === 1;
  if (view === "runs") {
    $("title").textContent = alone ? nameOf(front()) : word("list");
    document.title = `${$("title").textContent} · anabatic`;
  }
  $("legend").replaceChildren(...(alone ? [] : chosen.map((one) => node("span", {}, node("i", { class: `c${one.colour} line` }), nameOf(one.id)))));
  PLOTS.forEach((one, at) => plots[at].draw(chosen.flatMap((run) => seriesOf(one, run, alone)), { zero: one.zero, log: one.log && $("log").checked, axis: $("axis").value, marks: at === 0 ? chosen.flatMap((run) => spikeMarks(run, alone)) : [] }));
  if ($("plot-files")) $("plot-files").hidden = plots.every((one) => one.node.hidden);
};

// Where a run had spikes, on the chosen axis, with the rows that were in those steps; of several runs in their colours.
const spikeMarks = ({ id, colour }, alone) => {
  const { curves, spikes = [] } = held.get(id) ?? {};
  return spikes.flatMap(({ step, rows: names }) => {
    const { x } = placed(curves, [[step], [0]], $("axis").value);
    const text = [word("spikeAt", step), names.slice(0, 5).join(", ")].filter(Boolean).join(": ");
    return x.map((value) => ({ x: value, colour: alone ? 0 : colour, text: alone ? text : `${nameOf(id)}: ${text}` }));
  });
};

// --- asking

// A message that the next polls leave there.
const AWHILE_MS = 6000;
let saidUntil = 0;
const sayAwhile = (text, bad = false) => { say(text, bad); saidUntil = performance.now() + AWHILE_MS; };

const tell = () => {
  if (performance.now() < saidUntil) return;
  const slow = chosen.find((one) => held.has(one.id) && held.get(one.id).share < 1);
  const texts = [];
  if (slow) texts.push(word("reading", nameOf(slow.id), Math.floor(100 * held.get(slow.id).share)));
  else if (chosen.length && chosen.every((one) => stateOf(one.id) === "evaluated")) texts.push("");
  else if (chosen.length && chosen.every((one) => held.has(one.id) && !Object.keys(held.get(one.id).curves).length)) texts.push(word("noCurves"));
  else if (chosen.length && chosen.every((one) => held.has(one.id)) && plots.every((one) => one.node.hidden)) texts.push(word("noPlots"));
  say(texts.join(" "));
};

const loadCurves = async ({ id }) => {
  const known = held.get(id);
  if (known && known.share === 1 && !live(id) && known.idle > 1) return false;
  const found = await get(`api/runs/${id}/curves?have=${encodeURIComponent(known?.version ?? "")}`);
  if (!chosen.some((one) => one.id === id)) return false;
  held.set(id, { curves: known?.curves ?? {}, spikes: known?.spikes ?? [], ...found, idle: found.curves ? 0 : (known?.idle ?? 0) + 1 });
  return Boolean(found.curves);
};

const loadAbout = async () => {
  const id = front();
  const version = `${held.get(id)?.version} ${listed.find((one) => one.id === id)?.state}`;
  if (!id || (about?.id === id && !live(id) && about.version === version)) return;
  const found = await get(`api/runs/${id}/about`);
  if (front() !== id) return;
  const same = about && JSON.stringify(about.found) === JSON.stringify(found);
  about = { id, found, version };
  $("about").hidden = false;
  showNote();
  $("start-from-run").hidden = !found.config;
  if (!same) { showFacts(found); await showPart(id, found, part); }
};

const refreshRuns = async () => {
  const round = pollRound;
  const { runs, left_out: left } = await get("api/runs");
  if (round !== pollRound) return RUN_SECONDS;
  listed = runs;
  $("left-out").textContent = left ? word("leftOut", left) : "";
  const there = chosen.filter((one) => runs.some((each) => each.id === one.id));
  if (!there.length && runs.length && !chosen.length && !held.size) chosen = [{ id: runs[0].id, colour: 1 }];
  else chosen = there;
  showList();
  const fresh = await Promise.all(chosen.map(loadCurves));
  if (round !== pollRound) return RUN_SECONDS;
  if (fresh.some(Boolean)) draw();
  await loadAbout();
  await showComparison();
  tell();
  if (chosen.some((one) => (held.get(one.id)?.share ?? 1) < 1)) return 0.2;
  return listed.some((one) => live(one.id)) ? RUN_SECONDS : QUIET_SECONDS;
};

// --- notes, tags, exports

const noteDrafts = new Map(); // id -> what was typed and not saved yet
let noteRun = null; // whose note stands in the form

const keepNote = () => { if (noteRun) noteDrafts.set(noteRun, { text: $("note-text").value, tags: $("note-tags").value }); };

const showNote = () => {
  const row = listed.find((one) => one.id === front());
  if (!row || (noteRun === row.id && $("note-form").contains(document.activeElement))) return;
  noteRun = row.id;
  const { text, tags } = noteDrafts.get(row.id) ?? { text: row.note, tags: row.tags.join(", ") };
  if ($("note-text").value !== text) $("note-text").value = text;
  if ($("note-tags").value !== tags) $("note-tags").value = tags;
};

const saveNote = async () => {
  const id = noteRun;
  const draft = noteDrafts.get(id);
  const tags = $("note-tags").value.split(/[,，]/).map((tag) => tag.trim().replace(/^#/, "")).filter(Boolean);
  try {
    const saved = await post(`api/runs/${id}/note`, { text: $("note-text").value, tags });
    if (noteDrafts.get(id) === draft) noteDrafts.delete(id); // nothing was typed meanwhile
    Object.assign(listed.find((one) => one.id === id) ?? {}, { note: saved.text, tags: saved.tags });
    showList();
    sayAwhile(word("saved"));
  } catch (error) { sayAwhile(error.message, true); }
};

const download = (name, type, content) => {
  const link = node("a", { href: URL.createObjectURL(new Blob([content], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
};

const fileName = (name, suffix) => `${name.replace(/[^\p{L}\p{N}._-]+/gu, "-")}.${suffix}`;

// One row for each step of each chosen run, one column for each curve.
const saveCsv = () => {
  const quote = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const names = [...new Set(chosen.flatMap((run) => Object.keys(held.get(run.id)?.curves ?? {})))].sort();
  const lines = [["run", "step", ...names].map(quote).join(",")];
  for (const run of chosen) {
    const curves = held.get(run.id)?.curves ?? {};
    const table = new Map();
    names.forEach((name, column) => (curves[name]?.points ?? [[], []])[0].forEach((step, at) => {
      if (!table.has(step)) table.set(step, names.map(() => ""));
      table.get(step)[column] = curves[name].points[1][at] ?? "";
    }));
    for (const [step, values] of [...table].sort(([a], [b]) => a - b)) lines.push([quote(nameOf(run.id)), step, ...values].join(","));
  }
  download(fileName(exportName(""), "csv"), "text/csv", `${lines.join("\n")}\n`);
};

const selectRuns = (rest) => {
  const ids = [...new Set(rest.split(","))].filter((one) => /^[0-9a-f]{12}$/.test(one)).slice(0, MOST);
  if (ids.length && ids.join() !== chosen.map((one) => one.id).join()) {
    const before = front();
    chosen = ids.map((id, at) => ({ id, colour: at + 1 }));
    if (front() !== before) { about = null; $("about").hidden = true; }
  }
  draw();
};

const speakRuns = () => {
  plots = PLOTS.map((one) => new Plot({ ...one, menu: (plot) => exportMenu(plot, one.title) }));
  plots[0].node.classList.add("large");
  $("plots").replaceChildren(...plots.map((one) => one.node));
  const tabs = ["samples", "events", "checkpoints", "logs", "config", "spikes"].map((name) => {
    const made = button(name, () => { part = name; if (about) showPart(about.id, about.found, name); });
    made.dataset.part = name;
    return made;
  });
  const picture = (name, format) => button(name, () => savePicture(format, allPlots, ""));
  const again = button("startFromRun", () => { location.hash = `#/new?run=${front()}`; });
  again.id = "start-from-run";
  const plotFiles = node("span", { id: "plot-files" }, node("span", { class: "fine" }, word("allPlots")), button("exportCsv", saveCsv), picture("exportSvg", "svg"), picture("exportPng", "png"));
  $("exports").replaceChildren(again, plotFiles, button("report", () => saveReport(front(), nameOf(front())).catch((error) => say(error.message, true))));
  $("tabs").replaceChildren(...tabs);
  showList();
  draw();
  if (about) { showFacts(about.found); showPart(about.id, about.found, part); }
};

const setUpRuns = () => {
  for (const id of ["axis", "log", "smooth"]) $(id).addEventListener("change", () => { draw(); tell(); });
  $("find").addEventListener("input", showList);
  $("welcome-new").addEventListener("click", () => { location.hash = "#/new"; });
  $("welcome-recipe").addEventListener("click", () => { location.hash = "#/new?pick=recipe"; });
  $("note-form").addEventListener("input", keepNote);
  $("note-form").addEventListener("submit", (event) => { event.preventDefault(); saveNote(); });
  new ResizeObserver(() => { for (const one of plots) if (one.series.length) one.paint(); }).observe($("plots"));
};
