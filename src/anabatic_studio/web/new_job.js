// A new job: form and recipe side by side; each change of one is a change of the other.

let commands = [];
let checked = { text: "", values: {}, problems: [] };
let checkTimer = 0;
let waiting = []; // {changes, newOut, again}: checks that are still to be sent, one after another
let checking = null; // while a check is under way: done when none is left
let recipeRound = 0; // answers about a recipe that was replaced are dropped
let lastTyped = 0;
let isLoading = false; // the text was put there, and nobody has changed it yet
const TYPING_MS = 350;

const currentCommand = () => $("command").value;
const saveDraft = () => write(`draft.${currentCommand()}`, $("recipe").value);

// The text as it was loaded, kept beside the draft: another text holds work that nobody saved.
const saveLoaded = (command, text) => write(`loaded.${command}`, text);
const mayReplace = (command) => {
  const draft = read(`draft.${command}`, "");
  return !draft || draft === read(`loaded.${command}`, "") || window.confirm(word("replaceDraft", command));
};

const hintOf = ({ hint }) => (hint ? [node("span", { class: "fine hint" }, hint)] : []);

const showProblems = () => {
  const rows = checked.problems.map((problem) => {
    const text = [`${problem.line ? `${word("line", problem.line)}: ` : ""}${problem.message}`, ...hintOf(problem)];
    if (problem.line) return node("li", {}, node("button", { type: "button", class: "talk bad", onclick: () => selectLine(problem.line) }, ...text));
    return node("li", { class: "bad" }, ...text);
  });
  $("problems").replaceChildren(...(rows.length ? rows : [node("li", { class: "fine good" }, word("noProblems"))]));
  $("submit").disabled = rows.length > 0;
  $("submit").title = rows.length ? word("hasProblems") : "";
};

const selectLine = (line) => {
  if (!line) return;
  const lines = $("recipe").value.split("\n");
  const start = lines.slice(0, line - 1).reduce((sum, text) => sum + text.length + 1, 0);
  $("recipe").focus();
  $("recipe").setSelectionRange(start, start + (lines[line - 1]?.length ?? 0));
};

const isChange = ({ changes, newOut }) => newOut || Object.keys(changes).length > 0;

// Ask the server for the recipe with changes, its values and problems. One request at a time, each with the newest text:
// of two that overlap, the later answer would undo the earlier change.
const checkRecipe = (changes = {}, newOut = false) => {
  clearTimeout(checkTimer);
  checkTimer = 0;
  waiting = [...waiting.filter(isChange), { changes, newOut }];
  checking ??= checkAll().finally(() => { checking = null; });
  return checking;
};

const checkAll = async () => {
  while (waiting.length) {
    const rest = TYPING_MS - (performance.now() - lastTyped);
    if (waiting[0].again && rest > 0) await new Promise((done) => { setTimeout(done, rest); });
    else await checkOnce(waiting.shift());
  }
};

// What was typed while a change was under way stays; the change is then made in the newer text.
const checkOnce = async (entry) => {
  const [round, command, sent] = [recipeRound, currentCommand(), $("recipe").value];
  let answer;
  try { answer = await post("api/recipe", { command, text: sent, changes: entry.changes, new_out: entry.newOut }); }
  catch (error) { if (round === recipeRound) refuseChange(entry, error); return; }
  if (round !== recipeRound) return;
  if ($("recipe").value !== sent) { if (isChange(entry)) waiting.unshift({ ...entry, again: true }); return; }
  checked = answer;
  putText(answer.text);
  if (isLoading) { saveLoaded(command, answer.text); isLoading = false; }
  saveDraft();
  showVariables(answer.values);
  fillForm(withWaiting(answer.values), answer.problems);
  showProblems();
  say("");
  if (waiting.length) return;
  if (command === "run") showStages(answer.stages); else loadPlan(command, answer.text, checkRecipe);
};

// The values of the recipe as they are when the changes that wait are made: a field keeps what was just chosen.
const withWaiting = (values) => {
  const changes = Object.entries(Object.assign({}, ...waiting.map((entry) => entry.changes)));
  const shown = { ...values, ...Object.fromEntries(changes) };
  for (const [key, value] of changes) if (value === null) delete shown[key];
  return shown;
};

// The field shows again what the recipe says, and nothing is queued that was not checked.
const refuseChange = ({ changes }, error) => {
  const keys = Object.keys(changes);
  isLoading = false;
  checked = { ...checked, problems: [{ message: error.message, key: keys[0] ?? "" }] };
  fillForm(withWaiting(checked.values), checked.problems, keys);
  showProblems();
  say(error.message, true);
};

// A new text with the caret at the same words.
const putText = (text) => {
  const area = $("recipe");
  const { value: before, selectionStart, selectionEnd, scrollTop } = area;
  if (before === text) return;
  area.value = text;
  if (area !== document.activeElement) return;
  let same = 0;
  while (same < before.length && before[same] === text[same]) same += 1;
  const moved = (at) => (at <= same ? at : Math.max(same, at + text.length - before.length));
  area.setSelectionRange(moved(selectionStart), moved(selectionEnd));
  area.scrollTop = scrollTop;
};

const checkLater = () => {
  isLoading = false;
  lastTyped = performance.now();
  saveDraft();
  clearTimeout(checkTimer);
  checkTimer = setTimeout(() => checkRecipe(), TYPING_MS);
};

// What was typed or chosen last is in the recipe, and the recipe is checked.
const settleRecipe = () => (checkTimer ? checkRecipe() : checking);

const changeSetting = (key, value) => checkRecipe({ [key]: value ?? (key.startsWith("vars.") ? "" : null) });

// The variables of a pipeline are those of its recipe: fields of their own, made anew when there are others.
let variables = null;
let commandGroups = [];
const showVariables = (values) => {
  const names = Object.keys(values).filter((key) => key.startsWith("vars."));
  if (currentCommand() !== "run" || names.join("\n") === variables) return;
  variables = names.join("\n");
  const fields = names.map((key) => ({ key, kind: "text", default: "", doc: "", zh: "", picks: values[key] ? "" : "data" }));
  const groups = commandGroups.map((group) => ({ ...group, fields: group.fields.filter((field) => !["vars", "stages"].includes(field.key)) }));
  showForm([{ title: word("variables"), zh: "", common: true, fields }, ...groups].filter((group) => group.fields.length), changeSetting);
};

const chooseCommand = async (command, text, changes = {}, newOut = false) => {
  $("command").value = command;
  const dropWaiting = () => { recipeRound += 1; waiting = []; clearTimeout(checkTimer); checkTimer = 0; };
  dropWaiting();
  try {
    const form = await get(`api/form?command=${encodeURIComponent(command)}`);
    if (currentCommand() !== command) return;
    variables = null;
    commandGroups = form.groups;
    showForm(form.groups, changeSetting);
    $("preview").hidden = !fieldNodes.has("data.train");
    $("copy-command").hidden = command === "run"; // its stages are no options
  } catch (error) { say(error.message, true); return; }
  dropWaiting();
  checked = { text: "", values: {}, problems: [] };
  const draft = read(`draft.${command}`, "");
  $("recipe").value = text ?? draft;
  isLoading = text !== undefined || !draft;
  if (isLoading) { saveLoaded(command, $("recipe").value); saveDraft(); }
  $("rows").hidden = true;
  await checkRecipe(changes, newOut);
};

const useRecipe = async (load) => {
  try {
    const { name, command, text } = await load();
    await settleRecipe();
    if (!mayReplace(command)) { await chooseCommand(command); return; }
    $("job-name").value = "";
    await chooseCommand(command, text);
    say(word("startedFrom", name));
  } catch (error) { say(error.message, true); }
};

// Recipes of the package, and files in the folders of data and runs.
const openRecipes = async () => {
  let found;
  try { found = await get("api/recipes"); } catch (error) { say(error.message, true); return; }
  const shipped = found.shipped.map((recipe) => ({
    value: recipe.name, about: word("recipeSummaries")[recipe.name] ?? recipe.summary, detail: `${recipe.command} · ${recipe.hardware}`,
    group: word("shippedRecipes"), entry: { name: recipe.name },
  }));
  const files = found.files.map((file) => ({ value: file, detail: "", group: word("recipeFiles"), entry: { file } }));
  openDialog(word("startFrom"), [...shipped, ...files], null, ([chosenEntry]) => useRecipe(() => post("api/recipes/read", chosenEntry)));
};

const shellQuote = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`);

const isScalar = (value) => value === null || typeof value !== "object";
const isOption = (value) => isScalar(value) || (Array.isArray(value) && value.length > 0 && value.every(isScalar));
const recipeFile = () => fileName($("job-name").value.trim() || currentCommand(), "yaml");

const saveFile = () => {
  download(recipeFile(), "application/yaml", $("recipe").value);
  saveLoaded(currentCommand(), $("recipe").value);
};

// Lists of mappings are no options: such a recipe is given as a file.
const copyCommandLine = async (pressed) => {
  await settleRecipe();
  const entries = Object.entries(checked.values);
  if (!entries.length && checked.problems.length) { say(word("noCommandLine", checked.problems[0].message), true); return; }
  const file = recipeFile();
  const whole = entries.every(([, value]) => isOption(value));
  const options = whole ? entries.flatMap(([key, value]) => [`--${key.replaceAll("_", "-")}`, ...[value].flat().map((item) => shellQuote(String(item)))]) : ["-c", shellQuote(file)];
  await copyText(["anabatic", currentCommand(), ...options].join(" "), pressed);
  say(whole ? "" : word("commandNeedsFile", file));
};

const submitJob = async () => {
  const name = $("job-name").value.trim();
  await settleRecipe();
  if (checked.problems.length) return;
  $("submit").disabled = true;
  try {
    const job = await post("api/jobs", { command: currentCommand(), text: $("recipe").value, name });
    $("recipe").value = "";
    $("job-name").value = "";
    isLoading = true;
    await checkRecipe(); // the next job, with a folder of its own
    location.hash = `#/queue/${job.id}`;
    say(word("submitted", job.name));
  } catch (error) { say(error.message, true); $("submit").disabled = false; }
};

// Small copies that the preview made: the page asks for no file by its name.
const showPicture = (one) => node("figure", {},
  ...(one.thumbnail ? [node("img", { src: one.thumbnail, alt: "" })] : []),
  node("figcaption", { class: "fine", title: one.name }, node("span", { class: "name" }, one.name.startsWith("data:") ? "data:" : one.name.split("/").pop()),
    ` ${one.width}\u00a0×\u00a0${one.height}`, ...(one.num_tokens === null ? [] : [node("br"), word("tokensOf", one.num_tokens)])));

const showPreview = async () => {
  $("rows").hidden = false;
  $("rows").replaceChildren(node("p", { class: "fine" }, word("reading2")));
  await settleRecipe();
  try {
    const preview = await post("api/preview", { command: currentCommand(), text: $("recipe").value });
    const rows = (preview.rows ?? []).map((row) => node("div", { class: "sample" },
      ...(row.num_tokens ? [node("span", { class: "fine" }, word("tokensOf", row.num_tokens))] : []),
      ...(row.pictures.length ? [node("div", { class: "pictures" }, ...row.pictures.map(showPicture))] : []),
      node("pre", {}, ...row.segments.map((segment) => node("span", { class: segment.learned ? "learned" : "context" }, segment.text)))));
    const key = node("p", { class: "fine" }, node("span", { class: "learned" }, word("learned")), " ", node("span", { class: "context" }, word("notLearned")));
    $("rows").replaceChildren(node("h2", {}, word("rows")), key, ...(rows.length ? rows : [none()]));
  } catch (error) { $("rows").replaceChildren(node("p", { class: "bad" }, error.message)); }
};

const enterNew = async (query) => {
  const command = query.get("command") ?? (currentCommand() || commands[0]?.name);
  const origins = { recipe: (name) => post("api/recipes/read", { name }), run: (id) => get(`api/runs/${encodeURIComponent(id)}/recipe`) };
  const origin = Object.keys(origins).find((name) => query.has(name));
  if (origin) {
    history.replaceState(null, "", "#/new");
    await useRecipe(() => origins[origin](query.get(origin)));
    if (fieldNodes.size) return;
  }
  const changes = Object.fromEntries([...query].filter(([key]) => !["command", "job", "run", "recipe", "pick"].includes(key)));
  let text = Object.keys(changes).length ? "" : undefined;
  if (query.has("job")) {
    try { text = (await get(`api/jobs/${Number(query.get("job"))}/recipe`)).text; } catch (error) { say(error.message, true); }
  }
  if (query.size) history.replaceState(null, "", "#/new");
  await settleRecipe();
  if (text !== undefined && !mayReplace(command)) { await chooseCommand(command); return; }
  if ((query.size && !origin) || !fieldNodes.size) await chooseCommand(command, text, changes, query.has("job"));
  if (query.has("pick")) $("start-from").click();
};

const setUpNew = (state) => {
  commands = state.commands;
  $("command").replaceChildren(...commands.map((row) => node("option", { value: row.name, title: row.help }, row.name)));
  $("command").addEventListener("change", () => chooseCommand(currentCommand()));
  $("recipe").addEventListener("input", checkLater);
  for (const name of ["all-settings", "find-setting"]) $(name).addEventListener("input", filterForm);
  $("submit").addEventListener("click", submitJob);
  $("preview").addEventListener("click", showPreview);
  $("start-from").addEventListener("click", openRecipes);
  $("save-recipe").addEventListener("click", async () => { await settleRecipe(); saveFile(); });
  $("copy-recipe").addEventListener("click", async ({ currentTarget }) => { await settleRecipe(); copyText($("recipe").value, currentTarget); });
  $("copy-command").addEventListener("click", (event) => copyCommandLine(event.currentTarget));
  $("form").addEventListener("submit", (event) => event.preventDefault());
  chipSelect.replaceChildren(node("option", { value: "here" }, word("here")), ...state.chips.map((chip) => node("option", { value: chip }, chip)));
  chipSelect.addEventListener("change", () => loadPlan(currentCommand(), $("recipe").value, checkRecipe));
};
