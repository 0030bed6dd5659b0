// Nodes, words and colours of a page.

const $ = (id) => document.getElementById(id);

const node = (name, attributes = {}, ...children) => {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") made.className = value;
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
};

const button = (name, act) => {
  const made = node("button", { type: "button", class: "plain" }, word(name));
  made.addEventListener("click", () => act(made));
  return made;
};

// While a word is being composed (Chinese input), Enter chooses it and Escape takes it back.
const isComposing = (event) => event.isComposing || event.keyCode === 229;

const copyText = async (text, button) => {
  try { await navigator.clipboard.writeText(text); }
  catch {
    // Without https browsers give no clipboard: an old way that still works.
    const area = node("textarea", { class: "hidden" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  button.textContent = word("copied");
  setTimeout(() => { button.textContent = word("copy"); }, 1500);
};

const translate = () => {
  document.documentElement.lang = language === "zh" ? "zh-Hans" : "en";
  for (const one of document.querySelectorAll("[data-words]")) one.textContent = word(one.dataset.words);
  for (const one of document.querySelectorAll("[data-title]")) { one.title = word(one.dataset.title); one.setAttribute("aria-label", one.title); }
  for (const one of document.querySelectorAll("[data-label]")) one.setAttribute("aria-label", word(one.dataset.label));
};

const dress = () => {
  if (settings.theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = settings.theme;
};

const fold = () => { document.body.classList.remove("side"); $("side-open").setAttribute("aria-expanded", "false"); };

const say = (text, bad = false) => {
  delete $("status").dataset.words;
  $("status").textContent = text;
  $("status").classList.toggle("bad", bad);
};
// The same by the name of its words, which `translate` finds when the language changes.
const sayWord = (name, bad = false) => { say(word(name), bad); $("status").dataset.words = name; };

// What both pages have: language, colours, the key, and the list that a narrow window folds away.
const frame = (speak, onKey) => {
  $("language").value = language;
  $("language").addEventListener("change", () => { language = $("language").value; set("language", language); speak(); });
  $("theme").value = settings.theme;
  $("theme").addEventListener("change", () => { set("theme", $("theme").value); dress(); });
  $("key").value = settings.key;
  $("key").addEventListener("change", () => { set("key", $("key").value); onKey(); });
  $("settings").addEventListener("submit", (event) => event.preventDefault());
  $("settings-open").addEventListener("click", () => {
    $("settings").hidden = !$("settings").hidden;
    $("settings-open").setAttribute("aria-expanded", String(!$("settings").hidden));
  });
  $("side-open").addEventListener("click", () => {
    const open = document.body.classList.toggle("side");
    $("side-open").setAttribute("aria-expanded", String(open));
    if (open) $("side-close").focus();
  });
  $("side-close").addEventListener("click", () => { fold(); $("side-open").focus(); });
  dress();
};
