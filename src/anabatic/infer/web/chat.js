// The page itself: what clicks and keys do.

const NARROW = matchMedia("(max-width: 46rem)");
let talk = null;

const hint = () => { $("say").placeholder = word(NARROW.matches ? "sayShort" : "sayHint"); };

const speak = () => {
  translate();
  hint();
  checkTools();
  showPicked();
  showTalks();
  showTurns();
};

// A keyboard on the screen must not come up unasked.
const backToMessage = () => { if (!NARROW.matches) $("say").focus(); };

const titleOf = (one) => one.title || word("untitled");

const showTalks = () => {
  $("talks").replaceChildren(...store.talks.map((one) => {
    const open = node("button", { type: "button", class: "talk", "aria-current": one === talk ? "true" : "false" }, titleOf(one));
    open.addEventListener("click", () => { choose(one); fold(); });
    const drop = node("button", { type: "button", class: "icon", title: word("remove"), "aria-label": `${word("remove")}: ${titleOf(one)}` }, "✕");
    drop.addEventListener("click", () => { if (one === talk) halt(); store.remove(one.id); if (one === talk) choose(null); else showTalks(); });
    return node("li", {}, open, drop);
  }));
};

const choose = (one) => { if (one !== talk) halt(); talk = one; showSecond(); say(""); showTalks(); showTurns(); };

const isServed = (model) => Boolean(model) && [...$("model").options].some((one) => one.value === model);

// The model that last answered in a column.
const lastModel = (column) => view(talk).columns[column]?.map((at) => talk.turns[at].model).findLast(Boolean);

const modelOf = (column) => (column === 1 ? $("second").value || lastModel(1) : $("model").value);

// A comparison that is opened goes on with its second model.
const showSecond = () => { $("second").value = isServed(lastModel(1)) ? lastModel(1) : settings.second ?? ""; };

const showAdd = () => { $("add").hidden = !seeing.has($("model").value); };

// One column of the comparison goes on, without the other.
const continueWith = (column) => {
  halt(1 - column);
  const used = lastModel(column);
  keepColumn(talk, column);
  for (const run of runs) run.column = undefined;
  if (isServed(used)) { $("model").value = used; set("model", used); showAdd(); }
  $("second").value = "";
  set("second", "");
  keep();
  showTurns();
  backToMessage();
};

// Asks `text` with `pictures` below some turns: of one, the second model may answer beside; of two, each is the end of a column.
const sendBelow = (parents, text, pictures) => {
  const shown = pictures.length ? { pictures: addPictures(talk, pictures) } : {};
  const questions = parents.map((parent) => addTurn(talk, parent, { role: "user", content: text, ...shown }));
  const [first] = questions;
  if (questions.length > 1) askBelow(questions.map((parent, column) => ({ parent, column })));
  else if (columnOf(talk, first) !== undefined) askBelow([{ parent: first, column: columnOf(talk, first) }]);
  else if ($("second").value) { halt(); askBelow([{ parent: first, column: 0 }, { parent: first, column: 1, second: true }]); }
  else askBelow([{ parent: first }]);
};

// Sends a question in place of one that stays as a version.
const sendAt = (ats, text, pictures) => { sendBelow(ats.map((at) => talk.turns[at].parent), text, pictures); backToMessage(); };

const send = (text, pictures) => {
  talk ??= store.create();
  talk.title ||= text.slice(0, 60);
  const { shared, columns } = view(talk);
  sendBelow(columns.length ? columns.map((path) => path.at(-1)) : [shared.at(-1) ?? ROOT], text, pictures);
};

const grow = () => {
  const area = $("say");
  area.style.height = "auto";
  const wanted = area.scrollHeight + area.offsetHeight - area.clientHeight;
  if (area.value) area.style.height = `${Math.min(240, wanted)}px`;
  area.classList.toggle("long", wanted > 240);
};

const loadModels = async () => {
  try {
    const found = await models();
    seeing = new Set(found.filter(isSeeing).map((one) => one.id));
    const known = (name) => found.some((one) => one.id === name);
    const options = () => found.map((one) => node("option", { value: one.id }, one.root === null ? word("adapter", one.id) : one.id));
    const none = (name) => node("option", { value: "", "data-words": name }, word(name));
    $("model").replaceChildren(...(found.length ? options() : [none("noModels")]));
    $("model").value = settings.model = known(settings.model) ? settings.model : found[0]?.id ?? "";
    $("second").replaceChildren(none("noSecond"), ...options());
    settings.second = known(settings.second) ? settings.second : "";
    showSecond();
    showAdd();
    if ($("status").classList.contains("bad")) say("");
  } catch (error) { say(error.message, true); }
};

const submit = async () => {
  await picked.ready;
  const text = $("say").value.trim();
  if (!text && !picked.list.length || runs.size) return;
  const problem = checkTools() || picked.list.length && blindProblem();
  if (problem) { say(problem, true); return; }
  const pictures = picked.list;
  picked.list = [];
  showPicked();
  $("say").value = "";
  grow();
  send(text, pictures);
};

const followStorage = (event) => {
  if (event.key !== `${KEY}talks`) return;
  talk = store.follow(talk, runs.size > 0);
  showTalks();
  const isTyped = [...document.querySelectorAll("#log textarea")].some((area) => area.value);
  if (!talk || !runs.size && !isTyped) showTurns();
};

const listen = () => {
  for (const name of FIELDS) {
    $(name).value = settings[name] ?? "";
    $(name).addEventListener("change", () => set(name, $(name).value));
  }
  $("tools").addEventListener("input", checkTools);
  $("model").addEventListener("change", () => { set("model", $("model").value); showAdd(); });
  $("second").addEventListener("change", () => {
    if (!$("second").value && view(talk).columns.length) continueWith(0);
    set("second", $("second").value);
  });
  $("new").addEventListener("click", () => { choose(null); fold(); $("say").focus(); });
  $("forget").addEventListener("click", () => {
    if (!confirm(word("forgetAsk"))) return;
    halt();
    store.talks = [];
    store.saveTalks();
    choose(null);
  });
  $("stop").addEventListener("click", stopAll);
  $("say").addEventListener("input", grow);
  $("say").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !isComposing(event)) { event.preventDefault(); $("composer").requestSubmit(); }
  });
  $("composer").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
  listenToPictures();
  document.addEventListener("keydown", (event) => { if (event.key === "Escape" && !isComposing(event)) { stopAll(); fold(); } });
  NARROW.addEventListener("change", hint);
  addEventListener("pagehide", () => { if (runs.size) { for (const run of runs) run.leave(); keep(); stopAll(); } });
  addEventListener("storage", followStorage);
};

const begin = () => {
  frame(speak, loadModels);
  listen();
  talk = store.talks[0] ?? null;
  speak();
  loadModels();
  $("say").focus();
};

begin();
