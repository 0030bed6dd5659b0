// Blocks of code with a button that copies them, in colours if highlight.js is there.

const COLOURED_CHARS = 30_000;
const COLOURED_LINE = 2_000;
const SLOW_MS = 100;
// Grammars whose time grows with the cube of a text that repeats itself: 17 s for 10 kB of "[a](", 75 s for 20 kB of "${".
const OTHER_GRAMMARS = { shell: "bash", console: "bash", shellsession: "bash", markdown: "", md: "", mkdown: "", mkd: "" };
// Scopes of highlight.js by the colour that they get; the others keep that of the text.
const SCOPE_COLOURS = Object.fromEntries(Object.entries({
  keyword: "keyword selector-tag tag name doctag template-tag",
  string: "string regexp char code formula",
  number: "number literal symbol bullet link",
  comment: "comment quote",
  title: "title section selector-class selector-id",
  type: "built_in type class attr attribute property selector-attr selector-pseudo template-variable",
  meta: "meta variable",
  added: "addition",
  removed: "deletion",
}).flatMap(([colour, scopes]) => scopes.split(" ").map((scope) => [scope, colour])));
const SCOPE_DEPTH = 20;

// What highlight.js returns beside its HTML: a tree of texts and scopes, of which we make nodes ourselves.
const scopeNodes = (children, depth = 0) => children.flatMap((one) => {
  if (typeof one === "string") return [one];
  const inner = depth < SCOPE_DEPTH ? scopeNodes(one.children, depth + 1) : [];
  const colour = Object.hasOwn(SCOPE_COLOURS, one.scope?.split(".")[0] ?? "") && SCOPE_COLOURS[one.scope.split(".")[0]];
  return colour ? [node("span", { class: `code-${colour}` }, ...inner)] : inner;
});

// Others take time that grows with the square. Twice as much is tried as long as the half was quick; null: it is too slow.
const readScopes = (text, language) => {
  for (let length = 1_000; ; length *= 2) {
    const began = performance.now();
    const tree = hljs.highlight(text.slice(0, length), { language, ignoreIllegals: true })._emitter.rootNode;
    if (length >= text.length) return tree;
    if (performance.now() - began > SLOW_MS) return null;
  }
};

const colourCode = (text, kind) => {
  const name = kind.toLowerCase();
  const language = Object.hasOwn(OTHER_GRAMMARS, name) ? OTHER_GRAMMARS[name] : name;
  if (text.length > COLOURED_CHARS || !globalThis.hljs?.getLanguage(language)) return [text];
  if (text.split("\n").some((line) => line.length > COLOURED_LINE)) return [text];
  const tree = readScopes(text, language);
  if (!tree) return [text];
  const box = node("span", {}, ...scopeNodes(tree.children));
  return box.textContent === text ? [...box.childNodes] : [text]; // deeper than SCOPE_DEPTH
};

// Colours of a block that still grows: those of its beginning are kept until a tenth more is there.
let growingCode = { kind: "", text: "", box: null };
const colourGrowing = (text, kind) => {
  const isNew = growingCode.kind !== kind || !growingCode.box || !text.startsWith(growingCode.text);
  if (isNew || text.length - growingCode.text.length > Math.max(200, growingCode.text.length / 10)) {
    const head = text.slice(0, text.lastIndexOf("\n") + 1);
    growingCode = { kind, text: head, box: node("span", {}, ...colourCode(head, kind)) };
  }
  return [...growingCode.box.cloneNode(true).childNodes, text.slice(growingCode.text.length)];
};

const codeBlock = (text, kind, grows = false) => node("div", { class: "code" },
  node("div", { class: "bar" }, node("span", {}, kind), node("button", { type: "button", class: "plain copy" }, word("copy"))),
  node("pre", { tabindex: "0" }, node("code", {}, ...(grows ? colourGrowing(text, kind) : colourCode(text, kind)))));

// One listener for all buttons: blocks are cloned, and clones lose their own.
document.addEventListener("click", (event) => {
  const button = event.target.closest?.(".code .copy");
  if (button) copyText(button.closest(".code").querySelector("pre").textContent, button);
});
