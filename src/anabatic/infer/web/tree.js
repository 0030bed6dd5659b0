// A conversation is a tree: turns in the order in which they were made, each with the index of its parent (ROOT: none).
// `next` of a turn is the child that is shown; `beside` of a question is the second model's answer to it, shown beside.
const ROOT = -1;

const holder = (talk, at) => (at === ROOT ? talk : talk.turns[at]);

const children = (talk, at) => talk.turns.flatMap((turn, index) => (turn.parent === at ? [index] : []));

const isChild = (talk, at, index) => Number.isInteger(index) && talk.turns[index]?.parent === at;

const isSplit = (talk, at) => isChild(talk, at, holder(talk, at).beside);

const shownChild = (talk, at) => {
  const { next } = holder(talk, at);
  return isChild(talk, at, next) ? next : children(talk, at).at(-1);
};

const isLast = (talk, at) => shownChild(talk, at) === undefined;

// A turn and what is shown below it. A parent is always older than its children, so this ends.
const pathFrom = (talk, at) => {
  const out = [];
  for (let index = at; index !== undefined; index = shownChild(talk, index)) out.push(index);
  return out;
};

// What is shown: turns that all have in common and, in a comparison, what each model adds in its column.
const view = (talk) => {
  const path = talk ? pathFrom(talk, shownChild(talk, ROOT)) : [];
  const cut = path.findIndex((at) => isSplit(talk, at)) + 1;
  if (!cut) return { shared: path, columns: [] };
  return { shared: path.slice(0, cut), columns: [path.slice(cut), pathFrom(talk, talk.turns[path[cut - 1]].beside)] };
};

// The column of a turn that is shown in a comparison; otherwise undefined.
const columnOf = (talk, at) => {
  const column = view(talk).columns.findIndex((path) => path.includes(at));
  return column < 0 ? undefined : column;
};

// The turns that take the same place, in the order in which they were made; the two sides of a comparison do not mix.
const versions = (talk, at) => {
  const { parent, second } = talk.turns[at];
  const all = children(talk, parent);
  return isSplit(talk, parent) ? all.filter((one) => Boolean(talk.turns[one].second) === Boolean(second)) : all;
};

const show = (talk, at) => {
  const { parent, second } = talk.turns[at];
  holder(talk, parent)[second && isSplit(talk, parent) ? "beside" : "next"] = at;
};

// Adds a turn below another and shows it. Returns its index.
const addTurn = (talk, parent, turn, second = false) => {
  const at = talk.turns.push({ ...turn, parent }) - 1;
  if (second) talk.turns[at].second = true;
  holder(talk, parent)[second ? "beside" : "next"] = at;
  return at;
};

// Ends the comparison that is shown: one column goes on, the other stays as a version.
const keepColumn = (talk, column) => {
  const { shared, columns } = view(talk);
  const question = talk.turns[shared.at(-1)];
  question.next = columns[column][0];
  delete question.beside;
};

// The pictures of a turn, each once in its conversation.
const picturesOf = (talk, { pictures = [] }) => pictures.map((at) => talk.pictures[at]);

const addPictures = (talk, list) => list.map((url) => (talk.pictures.includes(url) ? talk.pictures.indexOf(url) : talk.pictures.push(url) - 1));

// The turns from the first one to this one, with their pictures.
const lineage = (talk, at) => {
  const out = [];
  for (let index = at; index !== ROOT; index = talk.turns[index].parent) out.unshift({ ...talk.turns[index], pictures: picturesOf(talk, talk.turns[index]) });
  return out;
};

// Groups turns: each question with what follows it.
const rounds = (turns) => turns.reduce((out, turn) => {
  if (turn.role === "user" || !out.length) out.push([]);
  out.at(-1).push(turn);
  return out;
}, []);
