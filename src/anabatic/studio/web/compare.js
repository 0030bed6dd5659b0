// Compared runs: the settings that differ and the final figures, one column per run.

let comparedIds = "";

const comparisonTable = (title, first, runs, rows) => {
  const head = node("tr", {}, node("th", { scope: "col" }, first), ...runs.map((run) => node("th", { scope: "col" }, node("i", { class: `c${run.colour} line` }), run.name)));
  const body = rows.map(({ name, values, best }) => node("tr", {}, node("th", { scope: "row" }, name),
    ...values.map((value, index) => node("td", { class: best === index ? "best" : "" }, value))));
  return node("section", {}, node("h2", {}, title), node("div", { class: "wide" }, node("table", { class: "comparison" }, node("thead", {}, head), node("tbody", {}, ...body))));
};

const showComparison = async () => {
  const several = chosen.length > 1;
  $("comparison").hidden = !several;
  if (!several) { comparedIds = ""; return; }
  const ids = chosen.map((run) => run.id).join(",");
  const state = `${ids} ${chosen.map((run) => held.get(run.id)?.version).join()} ${language}`;
  if (state === comparedIds) return;
  comparedIds = state;
  let found;
  try { found = await get(`api/compare?ids=${ids}`); } catch (error) { say(error.message, true); return; }
  if (state !== comparedIds) return;
  const runs = chosen.map((run) => ({ name: nameOf(run.id), colour: run.colour }));
  const figures = found.figures.map((row) => ({ ...row, name: word("facts")[row.name] ?? WORDS[language][row.name] ?? row.name }));
  const settings = found.settings.length ? comparisonTable(word("comparedSettings"), word("setting"), runs, found.settings) : node("p", { class: "fine" }, word("same"));
  $("comparison").replaceChildren(settings, ...(figures.length ? [comparisonTable(word("comparedFigures"), word("figure"), runs, figures)] : []));
};
