// Tools that a user offers to a model, its calls of them, and their results.

const TOOL_NAME = /^[A-Za-z0-9_.-]{1,128}$/;

const toolProblem = (tool, at, names) => {
  const name = tool?.function?.name;
  if (tool?.type !== "function" || typeof tool.function !== "object") return word("toolShape", at + 1);
  if (!isText(name) || !TOOL_NAME.test(name)) return word("toolName", at + 1);
  if (names.indexOf(name) < at) return word("toolTwice", name);
  return "";
};

// Reads the field of the settings. Returns the tools, and what is wrong with them.
const readTools = (text) => {
  if (!text?.trim()) return { tools: [], problem: "" };
  let tools;
  try { tools = JSON.parse(text); }
  catch (error) { return { tools: [], problem: word("toolsJson", error.message) }; }
  if (!Array.isArray(tools)) return { tools: [], problem: word("toolsArray") };
  const names = tools.map((tool) => tool?.function?.name);
  return { tools, problem: tools.map((tool, at) => toolProblem(tool, at, names)).find(Boolean) ?? "" };
};

const checkTools = () => {
  const { problem } = readTools($("tools").value);
  $("tools-problem").textContent = problem;
  $("tools").setAttribute("aria-invalid", String(Boolean(problem)));
  return problem;
};

// Adds what came of calls, bit by bit or whole. Some servers give no index: then another id begins another call.
const addCalls = (calls, deltas) => {
  for (const delta of Array.isArray(deltas) ? deltas : []) {
    const id = isText(delta?.id) ? delta.id : "";
    const known = Number.isInteger(delta?.index) ? calls.find((call) => call.index === delta.index) : id && id !== calls.at(-1)?.id ? undefined : calls.at(-1);
    const call = known ?? { index: delta?.index, id: "", name: "", arguments: "" };
    if (!known) calls.push(call);
    const { name, arguments: given } = delta?.function ?? {};
    call.id ||= id;
    call.name ||= isText(name) ? name : "";
    call.arguments += isText(given) ? given : given ? JSON.stringify(given) : "";
  }
};

const keptCalls = (calls) => calls.map((call, at) => ({ id: call.id || `call_${at}`, name: call.name, arguments: call.arguments }));

// Indents complete JSON; texts and numbers stay as they were written, and what is not complete stays as it is.
const indented = (text) => {
  if (!/^\s*[{[]/.test(text) || !/[}\]]\s*$/.test(text)) return text;
  try { JSON.parse(text); } catch { return text; }
  let depth = 0, out = "";
  const line = () => `\n${"  ".repeat(Math.min(depth, 40))}`;
  for (const [token] of text.matchAll(/"(?:[^"\\]|\\.)*"|[{[]\s*[}\]]|[{}[\],:]|[^\s{}[\],:"]+/g)) {
    if (token === "{" || token === "[") { depth += 1; out += token + line(); }
    else if (token === "}" || token === "]") { depth -= 1; out += line() + token; }
    else if (token === ",") out += token + line();
    else out += token === ":" ? ": " : token;
  }
  return out;
};

const isJson = (text) => { try { return typeof JSON.parse(text) === "object"; } catch { return false; } };

// A block of code: the fence is longer than any in the text.
const fenced = (text) => {
  const fence = "`".repeat([...text.matchAll(/`+/g)].reduce((most, [run]) => Math.max(most, run.length + 1), 3));
  return markdown(`${fence}${isJson(text) ? "json" : ""}\n${indented(text)}\n${fence}`);
};

const callNode = (call) => {
  const title = node("summary", {}, node("span", {}, word("call")), " ", node("code", { class: "name" }, call.name || "…"));
  const box = node("details", { class: "call" }, title, ...(call.arguments ? fenced(call.arguments) : []));
  box.open = !call.folded;
  title.addEventListener("click", () => { call.folded = box.open; });
  return box;
};

const resultNode = (result) => node("section", { class: "result" }, node("h3", {}, word("resultOf", result.name)), ...fenced(result.content));

// Fields to type in, one below the other, each below its `lead`. Enter goes to the next empty one, or is done; `cancel` may be missing.
const typingNode = (fields, done, { label, cancel } = {}) => {
  const areas = fields.map((field) => {
    const area = node("textarea", { rows: field.rows, "aria-label": field.label });
    area.value = field.value;
    area.addEventListener("input", () => field.onInput?.(area.value));
    return area;
  });
  const finish = () => {
    const empty = areas.find((area, at) => !area.value.trim() && !fields[at].mayBeEmpty?.());
    if (empty) { empty.focus(); if (fields.length > 1) sayWord("resultMissing"); return; }
    done(areas.map((area) => area.value.trim()));
  };
  const box = node("form", { class: "typing" });
  fields.forEach((field, at) => box.append(...(field.lead ?? []), node("label", {}, node("span", { class: field.isNamed ? "fine" : "hidden" }, field.label), areas[at])));
  const buttons = node("div", { class: "tools" }, button(label, finish));
  if (cancel) buttons.append(button("cancel", cancel));
  box.append(buttons);
  box.addEventListener("submit", (event) => event.preventDefault());
  box.addEventListener("keydown", (event) => {
    if (event.target.tagName !== "TEXTAREA" || isComposing(event)) return;
    if (event.key === "Escape" && cancel) { event.stopPropagation(); cancel(); }
    if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); finish(); }
  });
  return box;
};

// Calls, each with a field for its result.
const resultsNode = (calls, done) => {
  const fields = calls.map((call) => ({
    lead: [callNode(call)], label: word("resultOf", call.name), isNamed: true, rows: "2", value: call.draft ?? "", onInput: (text) => { call.draft = text; },
  }));
  return typingNode(fields, (values) => done(calls.map(({ id, name }, at) => ({ id, name, content: values[at] }))), { label: "sendResults" });
};
