// Formulas in TeX: where they are in a text (rules for markdown-it), and their MathML, made by Temml.

// Opening mark, closing mark, on a line of its own?
const FORMULA_MARKS = [["\\(", "\\)", false], ["\\[", "\\]", true], ["$$", "$$", true], ["$", "$", false]];
const FORMULA_CHARS = 3_000;
const MOST_CELLS = 4_000;
const LONG_FORMULA = 80;
const FORMULAS_KEPT = 2_000;
const formulaCache = new Map();

// A formula that cannot be read, or is not whole yet, is shown as it was written.
const formulaSource = (tex, mark, shows) => {
  const [open, close, display] = FORMULA_MARKS.find((one) => one[0] === mark);
  return node(display ? "div" : "span", { class: display ? "formula" : "math" }, node("code", {}, `${open}${tex}${shows ? "" : close}`));
};

// \label names elements and \ref links to them: in a page whose elements have names of their own, neither may stay.
const disarmFormula = (box) => {
  for (const one of box.querySelectorAll("*")) {
    for (const name of ["id", "href", "src"]) one.removeAttribute(name);
    if (one.namespaceURI === document.documentElement.namespaceURI && one.localName !== "span") one.replaceWith(...one.childNodes);
  }
};

// Few characters make many elements: in rows that are filled up to the longest one, and with commands of their own.
const isBomb = (tex) => {
  if (/\\(?:[egx]?def|(?:re)?newcommand|providecommand|let|futurelet)(?![A-Za-z])/.test(tex)) return true;
  const rows = tex.split(/\\\\|\\cr(?![A-Za-z])|\\newline(?![A-Za-z])|\\begin/);
  return rows.length * Math.max(...rows.map((row) => row.split("&").length)) > MOST_CELLS;
};

const makeFormula = (tex, mark) => {
  const display = FORMULA_MARKS.find((one) => one[0] === mark)[2];
  if (!globalThis.temml || tex.length > FORMULA_CHARS || isBomb(tex)) return formulaSource(tex, mark, false);
  const box = display ? node("div", { class: "formula", tabindex: "0", lang: "" }) : node("span", { class: tex.length > LONG_FORMULA ? "math long" : "math", lang: "" });
  try {
    temml.render(tex, box, { displayMode: display, throwOnError: true, trust: false, maxExpand: 500, maxSize: [30, 300] });
  } catch {
    return formulaSource(tex, mark, false); // no TeX, or nested too deep for Temml
  }
  disarmFormula(box);
  return box;
};

const formulaNode = (tex, mark) => {
  const key = mark + tex;
  if (!formulaCache.has(key)) {
    if (formulaCache.size >= FORMULAS_KEPT) formulaCache.delete(formulaCache.keys().next().value);
    formulaCache.set(key, makeFormula(tex, mark));
  }
  return formulaCache.get(key).cloneNode(true);
};

// "$5 and $10": a price and words behind it, with no TeX command among them.
const isPrice = (text) => /^\d[\d.,]*/.test(text) && /(?:^|[^\\\p{L}])\p{L}{2,}/u.test(text.replace(/\\[A-Za-z]+(?:\{[^{}]*\})?/g, ""));

const isDollarFormula = (src, from, to) => {
  const text = src.slice(from, to);
  return text.trim() === text && !/[\p{L}\p{N}\\]/u.test(src[from - 2] ?? "") && !/[A-Za-z0-9]/.test(src[to + 1] ?? "") && !isPrice(text);
};

// Position of a closing mark that no backslash escapes; what is not there once is not looked for again.
const findFormulaEnd = (state, close, from) => {
  state.missingMarks ??= {};
  if (state.missingMarks[close] <= from) return -1;
  let at = state.src.indexOf(close, from);
  while (close[0] === "$" && at > from && /(?:^|[^\\])(?:\\\\)*\\$/.test(state.src.slice(Math.max(from, at - 20), at))) at = state.src.indexOf(close, at + 1);
  if (at < 0) state.missingMarks[close] = from;
  return at >= 0 && at + close.length <= state.posMax ? at : -1;
};

const formulaInside = (state, silent) => {
  const dollars = /\$*/y;
  dollars.lastIndex = state.pos;
  const run = dollars.exec(state.src)[0].length;
  if (run > 2) {
    if (!silent) state.pending += "$".repeat(run);
    state.pos += run;
    return true;
  }
  const found = FORMULA_MARKS.find(([mark]) => state.src.startsWith(mark, state.pos));
  if (!found) return false;
  const [mark, close] = found;
  const from = state.pos + mark.length;
  const end = findFormulaEnd(state, close, from);
  const opens = end < 0 && mark !== "$" && state.env.streaming;
  if (!opens && (end < 0 || !state.src.slice(from, end).trim())) return false;
  if (mark === "$" && !isDollarFormula(state.src, from, end)) return false;
  if (!silent) {
    const token = state.push("formula", "", 0);
    Object.assign(token, { content: state.src.slice(from, opens ? state.posMax : end), markup: mark, meta: { opens } });
  }
  state.pos = opens ? state.posMax : end + close.length;
  return true;
};

// Looks for the line with the closing mark. Returns [line, position in it], or how far it looked in vain.
const findClosingLine = (state, start, end, open, close) => {
  const first = state.src.slice(state.bMarks[start] + state.tShift[start], state.eMarks[start]);
  const mayHaveBlanks = first.trim() === open;
  for (let line = start; line < end; line += 1) {
    const isBlank = state.isEmpty(line);
    if (line > start && ((isBlank && !mayHaveBlanks) || (!isBlank && state.sCount[line] < state.blkIndent))) return { until: line, at: -1 };
    const from = state.bMarks[line] + state.tShift[line] + (line === start ? open.length : 0);
    const at = state.src.slice(from, state.eMarks[line]).indexOf(close);
    if (at >= 0) return { until: line, at: from + at };
  }
  return { until: end, at: -1 };
};

const formulaBlock = (state, start, end, silent) => {
  const from = state.bMarks[start] + state.tShift[start];
  const [open, close] = FORMULA_MARKS.find(([mark, , display]) => display && state.src.startsWith(mark, from)) ?? [];
  if (!open || state.sCount[start] - state.blkIndent >= 4) return false;
  state.env.searched ??= {};
  const known = state.env.searched[close];
  if (known && known.end === end && start >= known.start && start < known.until) return false;
  const { until, at } = findClosingLine(state, start, end, open, close);
  const opens = at < 0 && until === end && state.env.streaming;
  if (at < 0 && !opens) {
    state.env.searched[close] = { start, until, end };
    return false;
  }
  // Words behind the formula: a paragraph with a formula in it.
  if (!opens && state.src.slice(at + close.length, state.eMarks[until]).trim()) return false;
  if (silent) return true;
  state.line = opens ? end : until + 1;
  const lines = state.getLines(start, state.line, state.blkIndent, false).trimStart().slice(open.length);
  const token = state.push("formula", "", 0);
  token.content = opens ? lines : lines.slice(0, lines.lastIndexOf(close));
  Object.assign(token, { block: true, markup: open, map: [start, state.line], meta: { opens } });
  return true;
};
