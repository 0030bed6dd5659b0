// Markdown as language models write it, into nodes: markdown-it reads it, and no text ever becomes HTML.

const MARKDOWN_CHARS = 300_000; // what is longer is shown as it is
const DEEPEST_BLOCK = 32; // levels of quotations and lists; what lies deeper is a paragraph
const DEEPEST_NODE = 60;
const WIDEST_TABLE = 100; // columns
const MOST_NODES = 50_000; // of a text; what comes behind them is shown as it is
const BLOCKS_KEPT = 1_000;
const REFERENCES_KEPT = 20;
const TAGS = { s: "del", h1: "h3", h2: "h4", h3: "h5", h4: "h6", h5: "h6", h6: "h6" };
const CJK = /[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Hangul}\u2018-\u201d\u3000-\u303f\uff00-\uffef]/u;

// A model that repeats itself writes thousands of levels, or of columns: a paragraph is made of them.
const plainBlock = (state, start, end, silent) => {
  const isDeep = state.level >= DEEPEST_BLOCK;
  const isWide = !isDeep && state.src.slice(state.bMarks[start], state.eMarks[start]).split("|", WIDEST_TABLE + 2).length > WIDEST_TABLE + 1;
  if (!isDeep && !isWide) return false;
  if (silent) return true;
  let stop = isDeep ? end : start + 1;
  while (stop < end && !state.isEmpty(stop)) stop += 1;
  state.push("paragraph_open", "p", 1).map = [start, stop];
  const token = state.push("inline", "", 0);
  Object.assign(token, { content: state.getLines(start, stop, state.blkIndent, false).trim(), map: [start, stop], children: [] });
  state.push("paragraph_close", "p", -1);
  state.line = stop;
  return true;
};

// CommonMark lets ** close only where a word ends, which Chinese punctuation and words without spaces do not show.
const allowMarksBesideChinese = (State) => {
  const { scanDelims } = State.prototype;
  State.prototype.scanDelims = function scan(start, canSplitWord) {
    const found = scanDelims.call(this, start, canSplitWord);
    const before = this.src[start - 1] ?? " ", after = this.src[start + found.length] ?? " ";
    if (canSplitWord && (CJK.test(before) || CJK.test(after))) {
      found.can_open ||= /\S/.test(after);
      found.can_close ||= /\S/.test(before);
    }
    return found;
  };
};

const makeParser = () => {
  // A line of - below a text is a rule: as a heading, the text would change while a list below it is written.
  const parser = markdownit({ html: false, breaks: true, linkify: true }).disable("lheading");
  parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
  parser.block.ruler.before("table", "plain", plainBlock);
  parser.block.ruler.after("plain", "formula", formulaBlock, { alt: ["paragraph", "reference", "blockquote", "list"] });
  parser.inline.ruler.before("escape", "formula", formulaInside);
  allowMarksBesideChinese(parser.inline.State);
  return parser;
};

const markdownParser = globalThis.markdownit ? makeParser() : null;

const linkNode = (target, ...inner) =>
  (/^(https?:|mailto:)/i.test(target ?? "") ? node("a", { href: target, rel: "noopener noreferrer nofollow", target: "_blank" }, ...inner) : null);

const textNodes = (text) => text.split(/<br\s*\/?>/i).flatMap((one, at) => (at ? [node("br"), one] : [one]));

// An element without children, by the type of its token; a type that is not here is shown as its text.
const LEAVES = {
  text: (token) => textNodes(token.content),
  softbreak: () => [node("br")],
  hardbreak: () => [node("br")],
  hr: () => [node("hr")],
  code_inline: (token) => [node("code", {}, token.content)],
  code_block: (token) => [codeBlock(token.content.replace(/\n$/, ""), "")],
  fence: (token, grows) => [codeBlock(token.content.replace(/\n$/, ""), token.info.trim().split(/\s/)[0], grows)],
  formula: (token, grows, budget) => {
    if (token.meta.opens || budget.nodes < 0) return [formulaSource(token.content, token.markup, token.meta.opens)];
    const made = formulaNode(token.content.trim(), token.markup);
    budget.nodes -= made.getElementsByTagName("*").length;
    return [made];
  },
  // Pictures of other sites are not loaded: they would tell who reads what.
  image: (token) => {
    const text = token.content || token.attrGet("src");
    return [linkNode(token.attrGet("src"), text) ?? text];
  },
};

// Returns an element with children as [what the parent gets, what the children go into]; null: the parent gets them.
const openNode = (token) => {
  if (token.hidden) return null;
  if (token.type === "link_open") {
    const made = linkNode(token.attrGet("href"));
    return made && [made, made];
  }
  if (token.type === "table_open") {
    const table = node("table");
    return [node("div", { class: "table", tabindex: "0" }, table), table];
  }
  const made = node(TAGS[token.tag] ?? token.tag);
  const side = /^text-align:(right|center)$/.exec(token.attrGet("style") ?? "");
  if (side) made.className = side[1];
  if (token.tag === "ol" && token.attrGet("start") !== null) made.setAttribute("start", token.attrGet("start"));
  return [made, made];
};

// "[ ] text" and "[x] text" at the beginning of an item.
const markTask = (item) => {
  const text = item.firstChild?.nodeName === "P" ? item.firstChild.firstChild : item.firstChild;
  const found = text?.nodeType === Node.TEXT_NODE && /^\[([ xX])\]\s+/.exec(text.data);
  if (!found) return;
  text.data = text.data.slice(found[0].length);
  const box = node("input", { type: "checkbox", disabled: "", "aria-label": word(found[1] === " " ? "taskOpen" : "taskDone") });
  if (found[1] !== " ") box.setAttribute("checked", "");
  text.before(box);
  item.className = "task";
};

const buildNodes = (tokens, grows, budget) => {
  const root = document.createDocumentFragment();
  const open = [root];
  const add = (token) => {
    const parent = open.at(-1);
    budget.nodes -= 1;
    if (token.type === "inline") token.children.forEach(add);
    else if (token.nesting === 1) {
      const made = open.length < DEEPEST_NODE ? openNode(token) : null;
      if (made) parent.append(made[0]);
      open.push(made ? made[1] : parent);
    } else if (token.nesting === -1) {
      open.pop();
      if (token.type === "list_item_close") markTask(parent);
    } else parent.append(...(LEAVES[token.type] ?? LEAVES.text)(token, grows, budget));
  };
  tokens.forEach(add);
  root.normalize();
  return root;
};

// The sources of the blocks that are not inside another one.
const splitBlocks = (text, env) => {
  const tokens = [];
  markdownParser.block.parse(text, markdownParser, env, tokens);
  const lines = text.split("\n");
  const starts = tokens.filter((token) => token.level === 0 && token.nesting >= 0).map((token) => token.map[0]);
  return starts.map((start, at) => lines.slice(start, starts[at + 1]).join("\n"));
};

// Without the library: the text as it was written, and fenced code as such.
const plainBlocks = (text) => {
  const out = [];
  let lines = [], fence = null;
  const flush = () => {
    const inside = lines.join("\n");
    if (fence) out.push(codeBlock(inside, fence[2]));
    else if (inside.trim()) out.push(node("p", { class: "plain-text" }, inside.replace(/^\n+|\n+$/g, "")));
    lines = [];
  };
  for (const line of text.split("\n")) {
    const mark = /^\s*(`{3,}|~{3,})\s*([^`\s]*)/.exec(line);
    if (fence ? line.trim().startsWith(fence[1]) && !mark?.[2] : mark) { flush(); fence = fence ? null : mark; }
    else lines.push(line);
  }
  flush();
  return out;
};

const blockCache = new Map();
const knownReferences = [];

// A short name of the addresses that [text][name] of a text refers to.
const nameReferences = (references) => {
  const text = JSON.stringify(references ?? {});
  if (!knownReferences.includes(text)) {
    if (knownReferences.length >= REFERENCES_KEPT) { knownReferences.length = 0; blockCache.clear(); }
    knownReferences.push(text);
  }
  return knownReferences.indexOf(text);
};

const renderBlock = (source, { references, name }, streaming, budget) => {
  const read = () => buildNodes(markdownParser.parse(source, { references, streaming }), streaming, budget);
  const key = [language, name, source].join("\0");
  const known = streaming ? null : blockCache.get(key);
  if (known) {
    budget.nodes -= known.cost;
    return [...known.made.cloneNode(true).childNodes];
  }
  const before = budget.nodes;
  const made = read();
  if (!streaming && budget.nodes >= 0) {
    if (blockCache.size >= BLOCKS_KEPT) blockCache.delete(blockCache.keys().next().value);
    blockCache.set(key, { made: made.cloneNode(true), cost: before - budget.nodes });
  }
  return [...made.childNodes];
};

// `open`: number of the block that still grows, if any.
const renderBlocks = (blocks, references, open = -1) => {
  const budget = { nodes: MOST_NODES };
  const shared = { references: references ?? {}, name: nameReferences(references) };
  const out = [];
  for (const [at, source] of blocks.entries()) {
    if (budget.nodes < 0) return [...out, ...plainBlocks(blocks.slice(at).join("\n"))];
    out.push(...renderBlock(source, shared, at === open, budget));
  }
  return out;
};

// Answers that are being written: the text before the last block is not read again, because it cannot change any more.
const ANSWERS_KEPT = 4;
let growingAnswers = [];
const splitGrowing = (text) => {
  const known = growingAnswers.filter((one) => text.startsWith(one.head)).sort((a, b) => b.head.length - a.head.length)[0] ?? { head: "", blocks: [] };
  const env = { streaming: true };
  const fresh = splitBlocks(text.slice(known.head.length), env);
  const last = fresh.pop();
  if (last === undefined) return known.blocks;
  const head = text.slice(0, text.length - last.length);
  const blocks = [...known.blocks, ...fresh];
  growingAnswers = [{ head, blocks }, ...growingAnswers.filter((one) => one !== known)].slice(0, ANSWERS_KEPT);
  return [...blocks, last];
};

// Returns the nodes of a text. `streaming`: more of it will come, so what is open at its end may still be closed.
const markdown = (text, streaming = false) => {
  let clean = text.replace(/\r\n?/g, "\n").replaceAll("\0", "\ufffd");
  if (!markdownParser || clean.length > MARKDOWN_CHARS) return plainBlocks(clean);
  if (!streaming) {
    const env = {};
    return renderBlocks(splitBlocks(clean, env), env.references);
  }
  // The first character of a mark says nothing yet: shown, it would vanish with the next one.
  clean = clean.replace(/(?:(?:^|\n)[ \t]*(?:`{1,2}|~{1,2}|\$|#{1,6})|\\)$/, "");
  const blocks = splitGrowing(clean);
  return renderBlocks(blocks, undefined, blocks.length - 1);
};
