// Compared runs: the settings that differ, the final figures, and the results of evaluations, one column per run.

let comparedState = "";

const factsOf = (pairs) => pairs.map(([name, text]) => word("evaluationFacts")[name]?.(text) ?? `${name} ${text}`).join(", ");

// A part that can be folded, and stays so.
const folded = new Set();
const section = (title, ...content) => {
  const made = node("details", { class: "part" }, node("summary", {}, node("h2", {}, title)), ...content);
  made.open = !folded.has(title);
  made.addEventListener("toggle", () => (made.open ? folded.delete(title) : folded.add(title)));
  return made;
};

const comparisonTable = (title, first, runs, rows, { note = "", mono = "" } = {}) => {
  const mark = (run) => (runs.length > 1 ? [node("i", { class: `c${run.colour} line` })] : []);
  const head = node("tr", {}, node("th", { scope: "col" }, first), ...runs.map((run) => node("th", { scope: "col" }, ...mark(run), run.name)));
  const body = rows.map(({ name, values, best, facts: pairs = [] }) => node("tr", {},
    node("th", { scope: "row" }, name, ...(pairs.length ? [node("span", { class: "fine" }, factsOf(pairs))] : [])),
    ...values.map((value, index) => node("td", { class: best === index ? "best" : "" }, value))));
  return section(title, ...(note ? [node("p", { class: "fine" }, note)] : []),
    node("div", { class: "wide" }, node("table", { class: `comparison ${mono}` }, node("thead", {}, head), node("tbody", {}, ...body))));
};

const showComparison = async () => {
  const several = chosen.length > 1;
  $("comparison").hidden = !several;
  if (!chosen.length) { comparedState = ""; $("evaluation").hidden = true; return; }
  const ids = chosen.map((run) => run.id).join(",");
  const versions = chosen.map((run) => `${held.get(run.id)?.version} ${listed.find((one) => one.id === run.id)?.evaluated}`);
  const state = `${ids} ${versions.join()} ${language}`;
  if (state === comparedState) return;
  comparedState = state;
  let found;
  try { found = await get(`api/compare?ids=${ids}`); } catch (error) { comparedState = ""; say(error.message, true); return; }
  if (state !== comparedState) return;
  const runs = chosen.map((run) => ({ name: nameOf(run.id), colour: run.colour }));
  const named = (row) => ({ ...row, name: word("facts")[row.name] ?? WORDS[language][row.name] ?? row.name });
  const settings = found.settings.length ? comparisonTable(word("comparedSettings"), word("setting"), runs, found.settings, { mono: "keys" }) : found.figures.length ? node("p", { class: "fine" }, word("same")) : "";
  $("comparison").replaceChildren(settings, ...(found.figures.length ? [comparisonTable(word("comparedFigures"), word("figure"), runs, found.figures.map(named))] : []));
  const results = found.evaluations.map((row) => ({ ...row, name: word("evaluationRows")[row.name] ?? row.name }));
  $("evaluation").hidden = !results.length;
  $("evaluation").replaceChildren(...(results.length ? [comparisonTable(word("evaluations"), word("figure"), runs, results, { note: runs.length > 1 ? word("evaluationNote") : word("evaluationInterval") })] : []));
};
