// The frame of the studio: which part is shown, and when each asks the server.

const VIEWS = ["runs", "new", "queue", "models", "devices"];
let view = "runs";
let ready = false;
let poll = 0;
let pollRound = 0;

// "#/queue/3", "#/runs/ID,ID", "#/new?command=sft"
const parseHash = () => {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, rest = ""] = path.split("/");
  return { name: VIEWS.includes(name) ? name : "runs", rest, query: new URLSearchParams(query) };
};

const showView = () => {
  for (const section of document.querySelectorAll("#scroll > section[data-view]")) section.hidden = section.dataset.view !== view;
  for (const link of $("nav").querySelectorAll("[data-view]")) {
    if (link.dataset.view === view) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  }
  $("run-list").hidden = view !== "runs";
  $("run-controls").hidden = view !== "runs";
  document.body.dataset.view = view;
  if (view !== "runs") {
    $("title").textContent = word(`${view}View`);
    document.title = `${$("title").textContent} · anabatic`;
  }
};

const route = async () => {
  const { name, rest, query } = parseHash();
  const changed = name !== view;
  view = name;
  showView();
  if (changed) { say(""); fold(); }
  if (!ready) return;
  try {
    if (view === "runs") selectRuns(rest);
    if (view === "new") await enterNew(query);
    if (view === "queue") enterQueue(/^\d+$/.test(rest) ? Number(rest) : null);
    if (view === "models") await enterModels();
  } catch (error) { say(error.message, true); }
  await pollNow();
};

const REFRESH = { runs: () => refreshRuns(), queue: () => refreshQueue(), models: () => refreshModels(), devices: () => refreshDevices() };
const SECONDS = { runs: 3, queue: 2, models: 2, devices: 3 };

// One request round at a time; nothing is asked while the page is hidden.
const pollNow = async () => {
  clearTimeout(poll);
  const mine = ++pollRound;
  if (!ready || !(view in REFRESH)) return;
  let pause = SECONDS[view];
  try { pause = (await REFRESH[view]()) ?? pause; } catch (error) { if (mine === pollRound) { say(error.message, true); askForKey(error); } }
  if (mine !== pollRound) return;
  poll = setTimeout(() => (document.hidden ? document.addEventListener("visibilitychange", pollNow, { once: true }) : pollNow()), 1000 * pause);
};

const speak = () => {
  translate();
  for (const name of ["find", "find-setting", "find-model"]) $(name).placeholder = word($(name).dataset.label);
  speakRuns();
  showView();
  if (ready) { showJobs(); showServers(); showModels(); showProblems(); if (fieldNodes.size) { showForm(formGroups, changeSetting); checkRecipe(); } }
};

// Without its token the page shows nothing: the field for it is opened once, and closed when it was right.
let asksForKey = false;
const showSettings = (shown) => { $("settings").hidden = !shown; $("settings-open").setAttribute("aria-expanded", String(shown)); };
const askForKey = (error) => {
  if (asksForKey || error.message !== word("needsKey")) return;
  asksForKey = true;
  showSettings(true);
  $("key").focus();
};
const keyAccepted = () => {
  if (!asksForKey) return;
  asksForKey = false;
  showSettings(false);
  $("scroll").focus();
};

const start = async () => {
  try {
    const state = await get("api/state");
    if (!ready) setUpNew(state);
    ready = true;
    say("");
    keyAccepted();
  } catch (error) { say(error.message, true); askForKey(error); poll = setTimeout(start, 3000); return; }
  await route();
};

const useToken = async () => {
  try { await post("api/login", { token: settings.key }); } catch (error) { say(error.message, true); return; }
  clearTimeout(poll);
  if (ready) { keyAccepted(); await pollNow(); } else await start();
};

frame(speak, useToken);
speak();
setUpRuns();
$("find-model").addEventListener("input", showModels);
window.addEventListener("hashchange", route);
start();
