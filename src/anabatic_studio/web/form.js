// The form of a command: fields made from its settings. Values go to the recipe, which is the only state.

const fieldNodes = new Map(); // dotted key -> {field, input, note}
let formGroups = [];

// A text of the server in the language of the page; names of sections have no translation.
const spoken = (english, { zh }) => (language === "zh" && zh) || english;

const showDefault = (value) => {
  if (value === null || value === "" || (Array.isArray(value) && !value.length)) return word("unset");
  return Array.isArray(value) ? value.join(", ") : typeof value === "object" ? JSON.stringify(value) : String(value);
};

const makeInput = (field, onChange) => {
  const attributes = { id: `f-${field.key}`, "aria-describedby": `d-${field.key}` };
  if (field.kind === "boolean") return node("input", { ...attributes, type: "checkbox", onchange: onChange });
  if (field.kind === "choice") {
    const options = field.choices.map((choice) => node("option", { value: choice }, choice));
    const empty = field.default === null ? [node("option", { value: "" }, word("unset"))] : [];
    return node("select", { ...attributes, onchange: onChange }, ...empty, ...options);
  }
  if (field.kind === "list") return node("textarea", { ...attributes, rows: field.picks ? 2 : 1, onchange: onChange, spellcheck: "false" });
  if (field.kind === "section") return node("p", { ...attributes, class: "fine" }, word("inText"));
  const numeric = field.kind === "integer" ? "numeric" : field.kind === "number" ? "decimal" : "text";
  return node("input", { ...attributes, type: "text", inputmode: numeric, onchange: onChange, spellcheck: "false", autocomplete: "off" });
};

// The typed value of an input; undefined: back to the default.
const readInput = (field, input) => {
  if (field.kind === "boolean") return input.checked === field.default ? undefined : input.checked;
  const text = input.value.trim();
  if (text === "") return undefined;
  if (field.kind === "choice") return text === field.default ? undefined : text;
  const parse = (kind, part) => (["integer", "number"].includes(kind) && part !== "" && Number.isFinite(Number(part)) ? Number(part) : part);
  if (field.kind === "list") return text.split("\n").map((line) => line.trim()).filter(Boolean).map((line) => parse(field.item, line));
  return parse(field.kind, text);
};

const fillInput = ({ field, input }, values, restore = false) => {
  const value = values[field.key];
  const isSet = value !== undefined;
  input.closest(".field").classList.toggle("set", isSet);
  if (field.kind === "section" || (input === document.activeElement && !restore)) return;
  if (field.kind === "boolean") { input.checked = isSet ? value === true : field.default === true; return; }
  if (field.kind === "choice") { input.value = isSet ? value ?? "" : field.default ?? ""; return; }
  const shown = Array.isArray(value) ? value.map((item) => (typeof item === "object" ? JSON.stringify(item) : item)).join("\n") : value ?? "";
  if (input.value !== String(shown)) input.value = shown;
  if (field.kind === "list") input.rows = Math.min(6, Math.max(field.picks ? 2 : 1, String(shown).split("\n").length));
};

const makeField = (field, onChange) => {
  const input = makeInput(field, () => onChange(field.key, readInput(field, input) ?? null));
  if (field.kind !== "boolean" && field.kind !== "choice" && field.kind !== "section") input.placeholder = showDefault(field.default);
  const label = node("label", { for: `f-${field.key}` }, field.key);
  const note = node("p", { class: "bad fine", hidden: "" });
  const doc = node("p", { class: "fine doc", id: `d-${field.key}` }, spoken(field.doc, field));
  const pick = field.picks ? [button("choose", () => openPicker(field, input, onChange))] : [];
  const body = node("div", { class: "field", "data-key": field.key }, node("div", { class: "row" }, label, ...pick), input, note, doc);
  if (field.kind === "boolean") { body.classList.add("tick-field"); body.firstChild.prepend(input); }
  fieldNodes.set(field.key, { field, input, note });
  return body;
};

const showForm = (groups, onChange) => {
  fieldNodes.clear();
  formGroups = groups;
  $("form").replaceChildren(...groups.map((group) => node("fieldset", { "data-common": String(group.common) },
    node("legend", {}, spoken(group.title, group)), ...group.fields.map((field) => makeField(field, onChange)))));
  filterForm();
};

const filterForm = () => {
  const wanted = $("find-setting").value.trim().toLowerCase();
  for (const set of $("form").querySelectorAll("fieldset")) {
    const listed = set.dataset.common === "true" || $("all-settings").checked || wanted !== "";
    let any = false;
    for (const one of set.querySelectorAll(".field")) {
      const { field } = fieldNodes.get(one.dataset.key);
      const shown = one.classList.contains("set") || (listed && (wanted === "" || `${field.key} ${field.doc} ${field.zh}`.toLowerCase().includes(wanted)));
      one.hidden = !shown;
      any ||= shown;
    }
    set.hidden = !any;
  }
};

// `restore`: keys of fields that are filled even while they are written in.
const fillForm = (values, problems, restore = []) => {
  for (const entry of fieldNodes.values()) {
    fillInput(entry, values, restore.includes(entry.field.key));
    const problem = problems.find((each) => each.key === entry.field.key);
    entry.note.hidden = !problem;
    entry.note.replaceChildren(...(problem ? [problem.message, ...hintOf(problem)] : []));
    entry.input.setAttribute("aria-invalid", String(Boolean(problem)));
  }
  filterForm();
};

// Models, or data files (several may be chosen), for a field.
const openPicker = async (field, input, onChange) => {
  const several = field.kind === "list";
  let entries;
  try {
    entries = field.picks === "model"
      ? (await get("api/models")).models.map((model) => ({ value: model.path, detail: model.adapter ? word("adapterOf", model.type) : model.type }))
      : (await get("api/files")).files.map((file) => ({ value: file.path, detail: bytes(file.bytes) }));
  } catch (error) { say(error.message, true); return; }
  const before = several ? input.value.split("\n").map((line) => line.trim()).filter(Boolean) : [];
  const done = (values) => { input.value = values.join("\n"); onChange(field.key, readInput(field, input) ?? null); input.focus(); };
  openDialog(field.key, entries, several ? before : null, done);
};

// A dialog with entries {value, detail, about, group} to choose one of, or several (`before`: those that are chosen).
const openDialog = (title, entries, before, onDone) => {
  const several = before !== null;
  const chosen = new Set(before ?? []);
  const dialog = $("picker");
  const done = (values) => { dialog.close(); onDone(values); };
  const row = ({ value, detail, about, entry }) => {
    const text = [node("span", {}, value, ...(about ? [node("small", {}, about)] : [])), node("span", { class: "fine" }, detail)];
    if (!several) return node("li", {}, node("button", { type: "button", class: "talk", onclick: () => done([entry ?? value]) }, ...text));
    const tick = node("input", { type: "checkbox" });
    tick.checked = chosen.has(value);
    tick.addEventListener("change", () => (tick.checked ? chosen.add(value) : chosen.delete(value)));
    return node("li", {}, node("label", { class: "talk" }, tick, ...text));
  };
  const list = node("div", { class: "choices" });
  const filter = node("input", { type: "search", "aria-label": word("filter"), placeholder: word("filter") });
  const draw = () => {
    const wanted = filter.value.trim().toLowerCase();
    const shown = entries.filter(({ value, detail, about }) => `${value} ${detail} ${about ?? ""}`.toLowerCase().includes(wanted)).slice(0, 300);
    const groups = [...new Set(shown.map((one) => one.group))];
    list.replaceChildren(...groups.flatMap((group) => [...(group ? [node("h3", {}, group)] : []), node("ul", { "aria-label": group ?? title }, ...shown.filter((one) => one.group === group).map(row))]),
      ...(shown.length ? [] : [node("p", { class: "fine" }, word("nothing"))]));
  };
  filter.addEventListener("input", draw);
  const ok = node("button", { type: "button", onclick: () => done([...chosen]) }, word("ok"));
  dialog.setAttribute("aria-label", title);
  dialog.replaceChildren(node("h2", {}, title), filter, list, node("div", { class: "row" }, button("cancel", () => dialog.close()), ...(several ? [ok] : [])));
  draw();
  dialog.showModal();
};
