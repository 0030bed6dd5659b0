// What a run has written beside its curves: facts, samples, events, checkpoints, logs, configuration.

const span = (seconds) => {
  const [unit, size] = [["s", 1, 90], ["min", 60, 5400], ["h", 3600, 172800], ["d", 86400, Infinity]].find((one) => seconds < one[2]);
  return `${+(seconds / size).toFixed(unit === "h" && seconds < 36000 ? 1 : 0)} ${word("units")[unit]}`;
};

const bytes = (value) => {
  for (const [unit, size] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (Math.abs(value) >= size * 0.9999) return `${+(value / size).toFixed(1)} ${unit}`;
  }
  return `${Math.round(value)} B`;
};

const plain = (text) => node("pre", {}, text);
const none = () => node("p", { class: "fine" }, word("nothing"));

const table = (head, rows, kind = "") => node("div", { class: "wide" }, node("table", { class: kind },
  node("thead", {}, node("tr", {}, ...head.map((one) => node("th", {}, one)))),
  node("tbody", {}, ...rows.map((row) => node("tr", {}, ...row.map((one, at) => node("td", { "data-name": head[at] }, one)))))));

const samplesPart = (about) => about.samples.flatMap(({ prompt, texts }) => [
  node("h3", {}, prompt),
  ...texts.toReversed().map(([step, text]) => node("div", { class: "sample" }, node("span", { class: "fine" }, word("afterStep", step)), plain(text))),
]);

const eventsPart = (about) => [
  ...(about.hidden_events ? [node("p", { class: "fine" }, word("hiddenEvents", about.hidden_events))] : []),
  ...(about.events.length ? [table(["", "", ""], about.events)] : []),
];

// A checkpoint is the state of a training: its model, to chat with or to evaluate, is written by a job.
const exportLink = (name, { path, step }) => {
  const query = new URLSearchParams({ command: "checkpoint export", checkpoint: path, out: path.replace(/\/[^/]*$/, `-step-${step}`) });
  return `#/new?${query}`;
};

const checkpointsPart = (about) => (about.checkpoints.length ? [table(word("columns"), about.checkpoints.toReversed().map((one) => [
  String(one.step ?? "–"), span(one.age_s), bytes(one.bytes), String(one.world_size ?? "–"), one.strategy ?? "–", one.command ?? "–",
  [one.best ? word("best") : "", one.fault || word("whole")].filter(Boolean).join(" · "),
  one.usable ? node("a", { href: exportLink(about.name, one) }, word("makeModel")) : "",
]))] : []);

const configPart = (about) => (about.config ? [plain(about.config)] : []);

// The steps that were skipped, of all chosen runs.
const spikesPart = () => {
  const several = chosen.length > 1;
  const rows = chosen.flatMap(({ id, colour }) => (held.get(id)?.spikes ?? []).toReversed().map((one) => [
    ...(several ? [node("span", {}, node("i", { class: `c${colour} line` }), nameOf(id))] : []),
    String(one.step), one.reason, one.loss === null ? "–" : exact(one.loss), one.grad_norm === null ? "–" : exact(one.grad_norm), one.rows.join(", "),
  ]));
  return rows.length ? [table([...(several ? [word("run")] : []), ...word("spikeColumns")], rows)] : [];
};

const PARTS = { samples: samplesPart, events: eventsPart, checkpoints: checkpointsPart, config: configPart, spikes: spikesPart };

// The end of the log of one process; which one is chosen above it.
const logPart = async (key, about) => {
  if (!about.logs.length) return [];
  const shown = plain("");
  const choose = node("select", { "aria-label": word("rank") }, ...about.logs.map((one) => node("option", { value: one.rank }, `${word("rank")} ${one.rank} · ${bytes(one.bytes)}`)));
  const load = async () => {
    try { shown.textContent = (await get(`api/runs/${key}/log/${choose.value}`)).text; }
    catch (error) { shown.textContent = error.message; }
  };
  choose.addEventListener("change", load);
  await load();
  return [node("p", { class: "rank" }, choose), shown];
};

const showFacts = (about) => {
  $("facts").replaceChildren(...about.facts.map(([name, value]) => node("div", {}, node("dt", {}, word("facts")[name] ?? name), node("dd", {}, value))));
  $("notes").replaceChildren(...about.notes.map((one) => node("p", { class: "bad" }, one)));
};

const showPart = async (key, about, name) => {
  $("tabs").querySelector('[data-part="spikes"]').hidden = !chosen.some(({ id }) => held.get(id)?.spikes?.length);
  for (const one of $("tabs").querySelectorAll("[data-part]")) one.setAttribute("aria-pressed", String(one.dataset.part === name));
  const made = name === "logs" ? await logPart(key, about) : PARTS[name](about);
  $("part").replaceChildren(...(made.length ? made : [none()]));
};

const saveReport = async (key, name) => {
  const { html } = await get(`api/runs/${key}/report`);
  download(fileName(`report-${name}`, "html"), "text/html", html);
};
