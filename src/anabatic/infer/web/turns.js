// Turns as they are shown.

const articleOf = (at) => $("log").querySelector(`[data-turn="${at}"]`);

// Reasoning is open until the answer begins; then it folds, unless the reader has opened or folded it.
const reasoningNode = (turn, grows) => {
  const isOpen = !(turn.content || turn.calls);
  const box = node("details", { class: "reasoning" }, node("summary", {}, word("reasoning")), ...markdown(turn.reasoning, grows && isOpen));
  box.open = turn.unfolded ?? isOpen;
  box.querySelector("summary").addEventListener("click", () => { turn.unfolded = !box.open; });
  return box;
};

// `grows`: more of the turn will come.
const spokenNodes = (turn, grows = false) => [...(turn.reasoning ? [reasoningNode(turn, grows)] : []), ...markdown(turn.content, grows)];

const answerNodes = (turn, grows) => [...spokenNodes(turn, grows), ...(turn.calls ?? []).map(callNode)];

// Exchanges what has changed and leaves the rest: a selection, a button that was pressed, what was folded.
const redraw = (body, fresh) => {
  fresh.forEach((one, at) => {
    const old = body.childNodes[at];
    if (!old) body.append(one);
    else if (old.tagName === "DETAILS" && one.tagName === "DETAILS" && old.className === one.className) {
      old.open = one.open;
      redraw(old, [...one.childNodes]);
    } else if (!old.isEqualNode(one)) old.replaceWith(one);
  });
  while (body.childNodes.length > fresh.length) body.lastChild.remove();
};

// What came at once has no speed.
const lengthOf = ({ tokens, seconds, first }) => [
  word("tokens", tokens),
  ...(tokens > 1 && seconds - first > 0.005 ? [word("speed", ((tokens - 1) / (seconds - first)).toFixed(1))] : []),
];

const howItWent = (how) => {
  const parts = how.tokens ? [...lengthOf(how), word("first", (how.first ?? 0).toFixed(2))] : [];
  if (how.end === "length") parts.push(word("cut"));
  if (how.end === "stopped") parts.push(word("stopped"));
  return parts.join(" · ");
};

// Shows the version before or after; of a question that both columns share, in both.
const step = (ats, by) => {
  const top = articleOf(ats[0]).getBoundingClientRect().top;
  const targets = ats.map((at) => { const all = versions(talk, at); return all[all.indexOf(at) + by] ?? at; });
  for (const at of targets) show(talk, at);
  keep();
  showTurns();
  const shown = articleOf(targets[0]);
  $("log").scrollTop += shown.getBoundingClientRect().top - top;
  const [back, on] = shown.querySelectorAll(".versions button");
  (by < 0 && !back.disabled || on.disabled ? back : on).focus();
  say(shown.querySelector(".versions .hidden").textContent);
};

const versionNodes = (ats) => {
  const all = versions(talk, ats[0]);
  const place = all.indexOf(ats[0]);
  if (all.length < 2) return [];
  const arrow = (name, sign, by) => {
    const made = node("button", { type: "button", class: "plain", title: word(name), "aria-label": word(name) }, sign);
    made.disabled = all[place + by] === undefined;
    made.addEventListener("click", () => step(ats, by));
    return made;
  };
  const count = node("span", { class: "fine" }, node("span", { "aria-hidden": "true" }, `${place + 1}/${all.length}`), node("span", { class: "hidden" }, word("version", place + 1, all.length)));
  return [node("span", { class: "versions", role: "group", "aria-label": word("versions") }, arrow("earlier", "‹", -1), count, arrow("later", "›", 1))];
};

// Puts fields into a turn instead of its text.
const editTurn = (ats, fields, done) => {
  const shown = articleOf(ats[0]);
  const cancel = () => { showTurns(); articleOf(ats[0])?.querySelector(".edit")?.focus(); };
  const box = typingNode(fields, done, { label: "save", cancel });
  shown.querySelector(".body").replaceChildren(box);
  shown.lastElementChild.remove();
  box.querySelector("textarea").focus();
};

const editButton = (act) => { const made = button("edit", act); made.classList.add("edit"); return made; };

// A fresh question, result or answer in place of one that stays as a version.
const askAgain = (at) => {
  const { parent, second } = talk.turns[at];
  askBelow([{ parent, column: columnOf(talk, at), second: second && isSplit(talk, parent) }]);
  backToMessage();
};

const answerCalls = (at, results) => {
  const column = columnOf(talk, at);
  for (const call of talk.turns[at].calls) delete call.draft;
  askBelow([{ parent: addTurn(talk, at, { role: "tool", content: "", results }), column }]);
  backToMessage();
};

const PARTS = {
  user: (turn, ats) => ({
    title: word("you"),
    body: [...(turn.pictures ? [shownPictures(picturesOf(talk, turn))] : []), ...(turn.content ? [node("p", { class: "plain-text" }, turn.content)] : [])],
    tools: [
      ...(turn.content ? [button("copy", (one) => copyText(turn.content, one))] : []),
      editButton(() => {
        const kept = picturesOf(talk, turn);
        const lead = kept.length ? [keptPictures(kept)] : [];
        const field = { label: word("edit"), rows: "3", value: turn.content, lead, mayBeEmpty: () => kept.some(Boolean) };
        editTurn(ats, [field], ([text]) => sendAt(ats, text, kept));
      }),
    ],
  }),
  tool: (turn, [at]) => ({
    title: word("results"),
    body: turn.results.map(resultNode),
    tools: [editButton(() => {
      const fields = turn.results.map(({ name, content }) => ({ label: word("resultOf", name), isNamed: true, rows: "2", value: content }));
      editTurn([at], fields, (values) => answerCalls(turn.parent, turn.results.map((one, place) => ({ ...one, content: values[place] }))));
    })],
  }),
  assistant: (turn, [at], column) => ({ title: nameOf(turn, column), body: bodyOf(turn, at), tools: toolsOf(turn, at, column) }),
};

const bodyOf = (turn, at) => {
  const isComplete = turn.how && !turn.error && !["stopped", "length"].includes(turn.how.end);
  if (turn.calls && isComplete && isLast(talk, at)) return [...spokenNodes(turn), resultsNode(turn.calls, (results) => answerCalls(at, results))];
  const out = answerNodes(turn, isRunning(at));
  const isSilent = !turn.content && !turn.reasoning && !turn.calls;
  if (isSilent && turn.how && !turn.error) out.push(node("p", { class: "fine" }, word("wordless")));
  if (turn.error) out.push(node("p", { class: "bad" }, turn.error));
  return out;
};

const toolsOf = (turn, at, column) => {
  const out = [];
  if (turn.content) out.push(button("copy", (one) => copyText(turn.content, one)));
  const isBeside = column !== undefined;
  if (isRunning(at)) { if (isBeside) out.push(button("stop", () => { for (const run of runs) if (run.at === at) run.abort(); })); return out; }
  out.push(button(turn.error ? "retry" : "again", () => askAgain(at)));
  if (isBeside && isLast(talk, at)) out.push(button("continueWith", () => continueWith(column)));
  return out;
};

// Two answers of one model are numbered.
const nameOf = (turn, column) => {
  const name = turn.model || word("model");
  if (column === undefined) return name;
  const [left, right] = view(talk).columns.map(([first]) => talk.turns[first]?.model);
  return left === right ? `${name} · ${column + 1}` : name;
};

// A turn, or a question that is in both columns: `ats` are its indices.
const turnNode = (ats, column) => {
  const turn = talk.turns[ats[0]];
  const { title, body, tools } = PARTS[turn.role](turn, ats, column);
  const row = node("div", { class: "tools" }, ...versionNodes(ats), ...tools, node("span", { class: "fine how" }, turn.how ? howItWent(turn.how) : ""));
  return node("article", { class: turn.role === "assistant" ? "theirs" : "mine", "aria-label": title, "data-turn": ats[0] },
    node("h2", {}, title), node("div", { class: "body" }, ...body), row);
};

// The rounds of a comparison, beside one another; a question that both columns share is above them.
const columnNodes = (columns) => {
  const [left, right] = columns.map((path) => rounds(path.map((at) => ({ at, role: talk.turns[at].role }))).map((round) => round.map(({ at }) => at)));
  return Array.from({ length: Math.max(left.length, right.length) }, (_, place) => {
    const pair = [left[place] ?? [], right[place] ?? []];
    const heads = pair.map(([at]) => talk.turns[at]);
    const isShared = heads.every((turn) => turn?.role === "user" && turn.content === heads[0].content && String(turn.pictures) === String(heads[0].pictures));
    const cells = pair.map((ats, column) => node("div", { class: "column" }, ...ats.slice(isShared ? 1 : 0).map((at) => turnNode([at], column))));
    return [...(isShared ? [turnNode(pair.map(([at]) => at))] : []), node("div", { class: "pair" }, ...cells)];
  }).flat();
};

const showTurns = () => {
  const { shared, columns } = view(talk);
  const shown = [...shared.map((at) => turnNode([at])), ...(columns.length ? columnNodes(columns) : [])];
  $("log").replaceChildren(...(shown.length ? shown : [node("p", { class: "empty" }, word("empty"))]));
  $("log").classList.toggle("split", columns.length > 0);
  $("log").scrollTop = $("log").scrollHeight;
};
