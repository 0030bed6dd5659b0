// Settings, which the pages share and this browser keeps.
const KEY = "anabatic.";

const read = (name, otherwise) => {
  try { return JSON.parse(localStorage.getItem(KEY + name)) ?? otherwise; }
  catch { return otherwise; } // storage that is switched off, or not ours
};

// Returns false when the browser keeps no more.
const write = (name, value) => {
  try { localStorage.setItem(KEY + name, JSON.stringify(value)); return true; }
  catch { return false; }
};

const settings = { language: "", theme: "auto", model: "", key: "", ...read("settings", {}) };
if (!Object.hasOwn(WORDS, settings.language)) settings.language = "";
if (!["light", "dark"].includes(settings.theme)) settings.theme = "auto";
language = settings.language || (navigator.language.startsWith("zh") ? "zh" : "en");

const set = (name, value) => {
  settings[name] = value;
  write("settings", { ...read("settings", {}), [name]: value });
};
