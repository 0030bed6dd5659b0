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

// Pictures of a conversation are data URIs; empty: one that was not kept. Turns have their indices, versions the same ones.
const readPictures = (all) => (Array.isArray(all) ? all.map((url) => (isText(url) && /^data:image\/(png|jpeg);base64,/.test(url) ? url : "")) : []);
const dropPictures = (talk) => Object.assign(talk, { pictures: talk.pictures.map(() => "") });

const readHow = ({ tokens, seconds, first, end }) => ({ tokens: Number(tokens) || 0, seconds: Number(seconds) || 0, first: Number(first) || 0, end: String(end ?? "") });

// Makes sure that what the page shows has the type it expects.
const readTurn = (turn, at, isTree, count) => {
  const out = isTree ? { ...turn } : { ...turn, parent: at - 1, next: at + 1 };
  for (const name of ["model", "error", "reasoning"]) if (!isText(out[name])) delete out[name];
  if (!Array.isArray(out.pictures) || !out.pictures.every((one) => Number.isInteger(one) && one >= 0 && one < count)) delete out.pictures;
  if (out.how) out.how = readHow(out.how);
  return out;
};

const readTalk = (one) => {
  const isTree = one?.version === FORMAT;
  if (!Array.isArray(one?.turns) || !one.turns.every(isTurn)) return null;
  const pictures = readPictures(one.pictures);
  const turns = one.turns.map((turn, at) => readTurn(turn, at, isTree, pictures.length));
  if (!turns.every(({ parent }, at) => Number.isInteger(parent) && parent >= ROOT && parent < at)) return null;
  return { next: 0, ...one, id: String(one.id), at: Number(one.at) || 0, title: isText(one.title) ? one.title : "", version: FORMAT, turns, pictures };
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

  // The newest first; when the browser is full, the oldest go, the pictures of all before. Returns the word for what was lost.
  saveTalks() {
    this.talks.sort((a, b) => b.at - a.at);
    const kept = [...this.talks];
    let lost = "";
    while (!write("talks", [...kept, ...this.newer])) {
      const heavy = kept.findLastIndex(({ pictures }) => pictures.some(Boolean));
      if (heavy < 0 && kept.length <= 1) return "notKept";
      lost = heavy < 0 ? "full" : "picturesLost";
      if (heavy < 0) kept.pop();
      else if (heavy) dropPictures(kept[heavy]);
      else kept[0] = dropPictures({ ...kept[0] }); // the page itself goes on with those of the newest
    }
    this.talks.length = kept.length;
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
    const talk = { id: `${Date.now()}-${Math.random().toString(36).slice(2)}`, at: Date.now(), title: "", version: FORMAT, turns: [], pictures: [] };
    this.talks.unshift(talk);
    return talk;
  },

  remove(id) { this.talks = this.talks.filter((talk) => talk.id !== id); this.saveTalks(); },
};
