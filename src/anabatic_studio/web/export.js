// Plots as files: SVG that needs no page around it (attributes in place of styles, light colours), and PNG drawn from it.

const PAPER_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'Noto Sans CJK SC', sans-serif";
const [WIDE, NARROW, GAP, MARGIN] = [960, 472, 16, 12];
const BORDER = 16; // around all plots
const MAX_NAME_CHARS = 60;
const HEAD = 30;
const ROW_HEIGHT = 18;
const PNG_SCALE = 2;

// The colours of the light theme, whatever the page shows now: read from the rule for `:root`.
const lightColours = () => {
  const rules = [...document.styleSheets].flatMap((sheet) => [...sheet.cssRules]);
  const style = rules.find((rule) => rule.selectorText === ":root").style;
  const value = (name) => style.getPropertyValue(name).trim();
  return { tones: ["c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8"].map((name) => value(`--${name}`)), ...Object.fromEntries(["card", "ink", "soft", "line", "bad"].map((name) => [name, value(`--${name}`)])) };
};

// What the style sheet says about a part of a plot, as attributes.
const PAINT = {
  path: (one, tone) => ({
    fill: "none", stroke: tone, "stroke-linejoin": "round", "stroke-width": one.classList.contains("raw") ? 1 : one.classList.contains("dots") ? 1.5 : 2,
    ...(one.classList.contains("raw") ? { opacity: 0.3 } : {}), ...(one.classList.contains("dots") ? { "stroke-dasharray": "5 3" } : {}),
  }),
  circle: (one, tone) => ({ fill: tone }),
  text: (one, tone, colours) => ({ fill: colours.soft, "font-size": 12, "font-family": PAPER_FONT }),
  line: (one, tone, colours) => (one.classList.contains("mark") ? { stroke: tone ?? colours.bad, "stroke-dasharray": "3 3" } : { stroke: colours.line }),
};

const inlineStyles = (root, colours) => {
  for (const one of root.querySelectorAll("path, circle, text, line")) {
    const tone = /\bc([1-8])\b/.exec(one.getAttribute("class") ?? "")?.[1];
    for (const [name, value] of Object.entries(PAINT[one.localName](one, tone && colours.tones[tone - 1], colours))) one.setAttribute(name, value);
  }
  for (const one of root.querySelectorAll("[class]")) one.removeAttribute("class");
};

const shorten = (text, most) => ([...text].length > most ? `${[...text].slice(0, most - 1).join("")}…` : text);

// Names of the lines below the title, in as many rows as they need.
const legendRows = (plot, width) => {
  const entries = plot.series.filter((one) => one.style !== "raw" || plot.series.every((each) => each.style === "raw"));
  const rows = [[]];
  let used = 0;
  for (const one of entries) {
    const name = shorten(one.name, Math.min(MAX_NAME_CHARS, Math.floor(width / 14)));
    const room = 34 + [...name].reduce((sum, sign) => sum + (sign.codePointAt(0) > 0x2e80 ? 12 : 6.6), 0);
    if (used + room > width && rows.at(-1).length) { rows.push([]); used = 0; }
    rows.at(-1).push({ one, name, at: used });
    used += room;
  }
  return rows;
};

// One plot as a group of `width`; returns it and its height.
const drawPlot = (plot, width, height, colours) => {
  const text = (at, content, more) => svg("text", { ...at, "font-family": PAPER_FONT, ...more }, content);
  const legend = legendRows(plot, width - 2 * MARGIN);
  const top = HEAD + ROW_HEIGHT * legend.length;
  const body = svg("svg", { x: 0, y: top, width, height, viewBox: `0 0 ${width} ${height}` }, ...plot.compose(width, height));
  inlineStyles(body, colours);
  const names = legend.flatMap((row, index) => row.flatMap(({ one, name, at }) => {
    const y = HEAD + ROW_HEIGHT * index + 6;
    const line = svg("line", { x1: MARGIN + at, x2: MARGIN + at + 18, y1: y, y2: y, stroke: colours.tones[one.colour - 1], "stroke-width": 2.5, ...(one.style === "dots" ? { "stroke-dasharray": "5 3" } : {}) });
    return [line, text({ x: MARGIN + at + 23, y: y + 4 }, name, { fill: colours.ink, "font-size": 12 })];
  }));
  const frame = svg("rect", { x: 0.5, y: 0.5, width: width - 1, height: top + height - 1, rx: 8, fill: colours.card, stroke: colours.line });
  const title = text({ x: MARGIN, y: 20 }, `${plot.title} · ${word(plot.axis)}`, { fill: colours.ink, "font-size": 13, "font-weight": 600 });
  return { group: svg("g", {}, frame, title, ...names, body), height: top + height };
};

const asDocument = (title, width, height, ...parts) => {
  const root = svg("svg", { xmlns: "http://www.w3.org/2000/svg", width, height, viewBox: `0 0 ${width} ${height}`, role: "img" }, svg("title", {}, title), ...parts);
  // Control characters, which XML cannot hold, may stand in the names of runs.
  const source = new XMLSerializer().serializeToString(root).replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]/g, "\ufffd");
  return { source: `<?xml version="1.0" encoding="UTF-8"?>\n${source}\n`, width, height };
};

const chosenNames = () => chosen.map((run) => nameOf(run.id)).join(", ");

const onePlot = (plot) => {
  const colours = lightColours();
  const { group, height } = drawPlot(plot, WIDE, 320, colours);
  return asDocument(`${plot.title}: ${chosenNames()}`, WIDE, height, group);
};

// All plots that are shown: the first over the whole width, the others in two columns.
const allPlots = () => {
  const colours = lightColours();
  const shown = plots.filter((one) => !one.node.hidden);
  const parts = [svg("rect", { width: "100%", height: "100%", fill: colours.card }), svg("text", { x: BORDER, y: BORDER + 14, "font-family": PAPER_FONT, "font-size": 14, "font-weight": 600, fill: colours.ink }, shorten(chosenNames(), 110))];
  const top = BORDER + 28;
  let y = top;
  let pair = [];
  const flush = () => { if (pair.length) y += Math.max(...pair) + GAP; pair = []; };
  for (const plot of shown) {
    const large = plot.node.classList.contains("large");
    if (large || pair.length === 2) flush();
    const { group, height } = drawPlot(plot, large ? WIDE : NARROW, large ? 280 : 190, colours);
    group.setAttribute("transform", `translate(${BORDER + pair.length * (NARROW + GAP)} ${y})`);
    parts.push(group);
    pair.push(height);
    if (large) flush();
  }
  flush();
  return asDocument(chosenNames(), WIDE + 2 * BORDER, Math.max(top, y - GAP) + BORDER, ...parts);
};

const drawPng = async ({ source, width, height }) => {
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(source)}`;
  await image.decode();
  const canvas = node("canvas", { width: width * PNG_SCALE, height: height * PNG_SCALE });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  const blob = await new Promise((done) => { canvas.toBlob(done, "image/png"); });
  if (!blob) throw new Error(word("noPng"));
  return blob;
};

const exportName = (part) => `${chosen.length === 1 ? nameOf(front()) : `${nameOf(chosen[0].id)}-${word("andMore", chosen.length - 1)}`}${part ? `-${part}` : ""}`;

const savePicture = async (format, make, part) => {
  if (!plots.some((one) => !one.node.hidden)) { say(word("noCurves"), true); return; }
  try {
    const picture = make();
    const content = format === "png" ? await drawPng(picture) : picture.source;
    download(fileName(exportName(part), format), format === "png" ? "image/png" : "image/svg+xml", content);
    sayAwhile(word("savedFile", fileName(exportName(part), format)));
  } catch (error) { sayAwhile(error.message || word("noPng"), true); }
};

// In the head of each plot: a small menu with both formats.
const exportMenu = (plot, part) => {
  const menu = node("details", { class: "save" });
  const item = (name, format) => {
    const made = button(name, () => { menu.open = false; menu.firstChild.focus(); savePicture(format, () => onePlot(plot), part); });
    made.setAttribute("aria-label", word("savePlotAs", plot.title, word(name)));
    return made;
  };
  const summary = node("summary", { "aria-label": word("savePlot", plot.title), title: word("savePlot", plot.title) }, "↓");
  menu.append(summary, node("span", {}, item("exportSvg", "svg"), item("exportPng", "png")));
  menu.addEventListener("keydown", (event) => { if (event.key === "Escape" && menu.open) { menu.open = false; summary.focus(); } });
  menu.addEventListener("focusout", (event) => { if (!menu.contains(event.relatedTarget)) menu.open = false; });
  return menu;
};
