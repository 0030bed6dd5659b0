// Blocks of code with a button that copies them, in colours if highlight.js is there.

const COLOURED_CHARS = 50_000;
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

const colourCode = (text, kind) => {
  const name = kind.toLowerCase();
  if (text.length > COLOURED_CHARS || !globalThis.hljs?.getLanguage(name)) return [text];
  const made = scopeNodes(hljs.highlight(text, { language: name, ignoreIllegals: true })._emitter.rootNode.children);
  const box = node("span", {}, ...made);
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
