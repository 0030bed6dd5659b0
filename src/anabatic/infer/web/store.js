// Conversations and settings, kept in this browser.
const KEY = "anabatic.";
const FIELDS = ["system", "temperature", "top_p", "top_k", "max_tokens", "seed"];

const read = (name, otherwise) => {
  try { return JSON.parse(localStorage.getItem(KEY + name)) ?? otherwise; }
  catch { return otherwise; } // storage that is switched off, or not ours
};

// Returns false when the browser keeps no more.
const write = (name, value) => {
  try { localStorage.setItem(KEY + name, JSON.stringify(value)); return true; }
  catch { return false; }
};

const store = {
  talks: read("talks", []).filter((talk) => talk && Array.isArray(talk.turns)),
  settings: { language: "", theme: "auto", model: "", key: "", ...read("settings", {}) },

  saveSettings() { write("settings", this.settings); },

  // The newest first; when the browser is full, the oldest go. Returns true when some had to.
  saveTalks() {
    this.talks.sort((a, b) => b.at - a.at);
    let lost = false;
    while (!write("talks", this.talks) && this.talks.length > 1) { this.talks.pop(); lost = true; }
    return lost;
  },

  create() {
    const talk = { id: `${Date.now()}-${Math.random().toString(36).slice(2)}`, at: Date.now(), title: "", turns: [] };
    this.talks.unshift(talk);
    return talk;
  },

  remove(id) { this.talks = this.talks.filter((talk) => talk.id !== id); this.saveTalks(); },
};
