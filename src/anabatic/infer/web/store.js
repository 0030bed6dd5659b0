// Conversations, kept in this browser.
const FIELDS = ["system", "temperature", "top_p", "top_k", "max_tokens", "seed"];

// What other programs or older pages left there must not break this one.
const readTalks = () => {
  const found = read("talks", []);
  const ours = (turn) => ["user", "assistant"].includes(turn?.role) && typeof turn.content === "string";
  return (Array.isArray(found) ? found : []).filter((one) => Array.isArray(one?.turns) && one.turns.every(ours));
};

const store = {
  talks: readTalks(),

  // The newest first; when the browser is full, the oldest go. Returns true when some had to.
  saveTalks() {
    this.talks.sort((a, b) => b.at - a.at);
    let lost = false;
    while (!write("talks", this.talks) && this.talks.length > 1) { this.talks.pop(); lost = true; }
    return lost;
  },

  // Another window has written; `own` is the conversation of this one.
  follow(own, busy) {
    const fresh = readTalks();
    const at = fresh.findIndex((one) => one.id === own?.id);
    if (busy && at >= 0) fresh[at] = own;
    else if (busy) fresh.unshift(own);
    this.talks = fresh;
    return busy ? own : fresh[at] ?? null;
  },

  create() {
    const talk = { id: `${Date.now()}-${Math.random().toString(36).slice(2)}`, at: Date.now(), title: "", turns: [] };
    this.talks.unshift(talk);
    return talk;
  },

  remove(id) { this.talks = this.talks.filter((talk) => talk.id !== id); this.saveTalks(); },
};
