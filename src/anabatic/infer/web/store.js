// Conversations, kept in this browser.
const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
const FIELDS = ["system", "tools", ...NUMBERS];

// 1 (without a number): a list of turns. 2: a tree, see tree.js.
const FORMAT = 2;

const isText = (value) => typeof value === "string";
const areTexts = (rows, names) => Array.isArray(rows) && rows.every((row) => names.every((name) => isText(row?.[name])));

// What must be there in a turn, by its role.
const ROLES = {
  user: () => true,
  assistant: ({ calls }) => calls === undefined || areTexts(calls, ["id", "name", "arguments"]),
  tool: ({ results }) => areTexts(results, ["id", "name", "content"]),
};
const isTurn = (turn) => isText(turn?.content) && isText(turn.role) && Object.hasOwn(ROLES, turn.role) && ROLES[turn.role](turn);

const readHow = ({ tokens, seconds, first, end }) => ({ tokens: Number(tokens) || 0, seconds: Number(seconds) || 0, first: Number(first) || 0, end: String(end ?? "") });

// Makes sure that what the page shows has the type it expects.
const readTurn = (turn, at, isTree) => {
  const out = isTree ? { ...turn } : { ...turn, parent: at - 1, next: at + 1 };
  for (const name of ["model", "error", "reasoning"]) if (!isText(out[name])) delete out[name];
  if (out.how) out.how = readHow(out.how);
  return out;
};

const readTalk = (one) => {
  const isTree = one?.version === FORMAT;
  if (!Array.isArray(one?.turns) || !one.turns.every(isTurn)) return null;
  const turns = one.turns.map((turn, at) => readTurn(turn, at, isTree));
  if (!turns.every(({ parent }, at) => Number.isInteger(parent) && parent >= ROOT && parent < at)) return null;
  return { next: 0, ...one, id: String(one.id), at: Number(one.at) || 0, title: isText(one.title) ? one.title : "", version: FORMAT, turns };
};

// What other programs or older pages left there must not break this one; what a newer page left is not touched.
const readTalks = () => {
  const found = read("talks", []);
  const all = Array.isArray(found) ? found : [];
  const isNewer = (one) => one?.version > FORMAT;
  return { talks: all.filter((one) => !isNewer(one)).map(readTalk).filter(Boolean), newer: all.filter(isNewer) };
};

const store = {
  ...readTalks(),

  // The newest first; when the browser is full, the oldest go. Returns the word for what was lost.
  saveTalks() {
    this.talks.sort((a, b) => b.at - a.at);
    let count = this.talks.length;
    while (!write("talks", [...this.talks.slice(0, count), ...this.newer])) {
      if (count <= 1) return "notKept";
      count -= 1;
    }
    const lost = count < this.talks.length ? "full" : "";
    this.talks.length = count;
    return lost;
  },

  // Another window has written; `own` is the conversation of this one.
  follow(own, busy) {
    Object.assign(this, readTalks());
    const at = this.talks.findIndex((one) => one.id === own?.id);
    if (!busy) return this.talks[at] ?? null;
    if (at >= 0) this.talks[at] = own;
    else this.talks.unshift(own);
    return own;
  },

  create() {
    const talk = { id: `${Date.now()}-${Math.random().toString(36).slice(2)}`, at: Date.now(), title: "", version: FORMAT, turns: [] };
    this.talks.unshift(talk);
    return talk;
  },

  remove(id) { this.talks = this.talks.filter((talk) => talk.id !== id); this.saveTalks(); },
};
