// Markdown as language models write it, into nodes: no text ever becomes HTML.
// Covers headings, lists, quotes, tables, fenced code, rules; bold, italics, strikes, code and links inside lines.

const INLINE = [
  [/^`(`*)([^`]+|[^`][\s\S]*?[^`])\1`(?!`)/, (m) => node("code", {}, m[2])],
  [/^\*\*(?=\S)([\s\S]*?\S)\*\*/, (m) => node("strong", {}, ...inline(m[1]))],
  [/^~~(?=\S)([\s\S]*?\S)~~/, (m) => node("del", {}, ...inline(m[1]))],
  [/^\*(?=[^\s*])([^*]*[^\s*])\*(?!\*)/, (m) => node("em", {}, ...inline(m[1]))],
  [/^_(?=[^\s_])([^_]*[^\s_])_(?![\p{L}\p{N}_])/u, (m) => node("em", {}, ...inline(m[1]))],
  [/^\[([^\]]+)\]\(([^()\s]+(?:\([^()\s]*\))?)\)/, (m) => link(m[1], m[2])],
  [/^https?:\/\/[^\s<>()"'，。；、]+[^\s<>()"'，。；、.,;:!?]/, (m) => link(m[0], m[0])],
];

const link = (text, target) => {
  if (!/^(https?:|mailto:)/i.test(target)) return document.createTextNode(text);
  return node("a", { href: target, rel: "noopener noreferrer nofollow", target: "_blank" }, text);
};

const inline = (text) => {
  const out = [];
  let plain = "";
  let at = 0;
  const flush = () => { if (plain) out.push(document.createTextNode(plain)); plain = ""; };
  while (at < text.length) {
    const rest = text.slice(at, at + 2000);
    const before = text[at - 1] ?? " ";
    if (rest[0] === "\\" && /[\\`*_[\]~#|]/.test(rest[1] ?? "")) { plain += rest[1]; at += 2; continue; }
    let found = null;
    if (/[`*_~[h]/.test(rest[0]) && !(/[_h]/.test(rest[0]) && /[\p{L}\p{N}]/u.test(before))) {
      for (const [pattern, make] of INLINE) {
        const match = pattern.exec(rest);
        if (match) { found = [match, make]; break; }
      }
    }
    if (found) { flush(); out.push(found[1](found[0])); at += found[0][0].length; }
    else { plain += text[at]; at += 1; }
  }
  flush();
  return out;
};

const lines = (text) => {
  const out = [];
  text.split("\n").forEach((one, at) => { if (at) out.push(node("br")); out.push(...inline(one)); });
  return out;
};

const codeBlock = (text, kind) => {
  const button = node("button", { type: "button", class: "plain copy" }, word("copy"));
  button.addEventListener("click", () => copyText(text, button));
  return node("div", { class: "code" }, node("div", { class: "bar" }, node("span", {}, kind), button),
    node("pre", { tabindex: "0" }, node("code", {}, text)));
};

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((one) => one.trim().replaceAll("\\|", "|"));

const table = (rows) => {
  const [head, rule, ...body] = rows.map(cells);
  const sides = rule.map((one) => (/^:-+:$/.test(one) ? "center" : /-:$/.test(one) ? "right" : "left"));
  const row = (values, name) => node("tr", {}, ...sides.map((side, at) => node(name, { class: side }, ...inline(values[at] ?? ""))));
  return node("div", { class: "table" }, node("table", {}, node("thead", {}, row(head, "th")), node("tbody", {}, ...body.map((one) => row(one, "td")))));
};

const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;

const list = (rows, depth) => {
  const indent = ITEM.exec(rows[0])[1].length;
  const ordered = /\d/.test(ITEM.exec(rows[0])[2]);
  const items = [];
  for (const row of rows) {
    const match = ITEM.exec(row);
    if (match && match[1].length <= indent + 1) items.push([match[3]]);
    else items.at(-1).push(row.slice(Math.min(row.length - row.trimStart().length, indent + 4)));
  }
  const start = ordered ? parseInt(ITEM.exec(rows[0])[2], 10) : 1;
  return node(ordered ? "ol" : "ul", ordered && start !== 1 ? { start } : {}, ...items.map((one) => {
    const inner = one.length === 1 ? inline(one[0]) : markdown(one.join("\n"), depth + 1);
    return node("li", {}, ...inner);
  }));
};

// Lists and quotations in one another; what lies deeper is plain text. A model that repeats itself writes thousands.
const DEEPEST = 16;

// Returns the nodes of a text; a fence that is still open is code already.
const markdown = (text, depth = 0) => {
  const rows = text.replaceAll("\r\n", "\n").split("\n");
  const out = [];
  let at = 0;
  const take = (wanted) => { const from = at; while (at < rows.length && wanted(rows[at], at - from)) at += 1; return rows.slice(from, at); };
  while (at < rows.length) {
    const row = rows[at];
    const fence = /^\s*(`{3,}|~{3,})\s*([^`\s]*)/.exec(row);
    const heading = /^(#{1,6})\s+(.*?)\s*#*$/.exec(row);
    if (!row.trim()) { at += 1; }
    else if (fence) {
      at += 1;
      const indent = row.length - row.trimStart().length;
      const inside = take((one) => !(one.trim().startsWith(fence[1]) && !one.trim().replaceAll(fence[1][0], "")));
      at += 1;
      out.push(codeBlock(inside.map((one) => one.slice(Math.min(indent, one.length - one.trimStart().length))).join("\n"), fence[2]));
    } else if (heading) { at += 1; out.push(node(`h${Math.min(6, heading[1].length + 2)}`, {}, ...inline(heading[2]))); }
    else if (/^\s*([-*_])(\s*\1){2,}\s*$/.test(row)) { at += 1; out.push(node("hr")); }
    else if (depth < DEEPEST && /^\s*>/.test(row)) {
      const inside = take((one) => /^\s*>/.test(one)).map((one) => one.replace(/^\s*>\s?/, ""));
      out.push(node("blockquote", {}, ...markdown(inside.join("\n"), depth + 1)));
    } else if (row.includes("|") && /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/.test(rows[at + 1] ?? "") && (rows[at + 1] ?? "").includes("-")) {
      out.push(table(take((one, n) => n < 2 || (one.includes("|") && one.trim()))));
    } else if (depth < DEEPEST && ITEM.test(row)) {
      out.push(list(take((one, n) => n === 0 || ITEM.test(one) || /^\s{2,}\S/.test(one)), depth));
    } else {
      const inside = take((one, n) => n === 0 || (one.trim() && !/^\s*(`{3,}|~{3,}|#{1,6}\s|>)/.test(one) && !ITEM.test(one)));
      out.push(node("p", {}, ...lines(inside.join("\n"))));
    }
  }
  return out;
};
