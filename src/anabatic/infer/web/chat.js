// The page itself: what is shown, and what clicks and keys do.

const NARROW = matchMedia("(max-width: 46rem)");
let talk = null;
let running = null; // AbortController of the answer that is being written

const hint = () => { $("say").placeholder = word(NARROW.matches ? "sayShort" : "sayHint"); };

const speak = () => {
  translate();
  hint();
  showTalks();
  showTurns();
};

const titleOf = (one) => one.title || word("untitled");

const showTalks = () => {
  $("talks").replaceChildren(...store.talks.map((one) => {
    const open = node("button", { type: "button", class: "talk", "aria-current": one === talk ? "true" : "false" }, titleOf(one));
    open.addEventListener("click", () => { choose(one); fold(); });
    const drop = node("button", { type: "button", class: "icon", title: word("remove"), "aria-label": `${word("remove")}: ${titleOf(one)}` }, "✕");
    drop.addEventListener("click", () => { if (one === talk) halt(); store.remove(one.id); if (one === talk) choose(null); else showTalks(); });
    return node("li", {}, open, drop);
  }));
};

const showTurns = () => {
  const turns = talk?.turns ?? [];
  $("log").replaceChildren(...(turns.length ? turns.map(turnNode) : [node("p", { class: "empty" }, word("empty"))]));
  $("log").scrollTop = $("log").scrollHeight;
};

// Reasoning is open until the answer begins; then it folds, unless the reader has opened or folded it.
const reasoningNode = (turn) => {
  const box = node("details", { class: "reasoning" }, node("summary", {}, word("reasoning")), ...markdown(turn.reasoning));
  box.open = turn.unfolded ?? !turn.content;
  box.querySelector("summary").addEventListener("click", () => { turn.unfolded = !box.open; });
  return box;
};

const answerNodes = (turn) => [...(turn.reasoning ? [reasoningNode(turn)] : []), ...markdown(turn.content)];

const turnNode = (turn, at) => {
  const mine = turn.role === "user";
  const body = node("div", { class: "body" }, ...(mine ? [node("p", { class: "plain-text" }, turn.content)] : answerNodes(turn)));
  const tools = node("div", { class: "tools" });
  if (turn.content) tools.append(button("copy", (one) => copyText(turn.content, one)));
  if (mine) tools.append(button("edit", () => edit(at)));
  const written = running && !turn.how && at === talk.turns.length - 1;
  if (!mine && !written && at === talk.turns.length - 1) tools.append(button(turn.error ? "retry" : "again", () => answer(at)));
  tools.append(node("span", { class: "fine how" }, turn.how ? howItWent(turn.how) : ""));
  if (!mine && !turn.content && !turn.reasoning && turn.how && !turn.error) body.append(node("p", { class: "fine" }, word("wordless")));
  if (turn.error) body.append(node("p", { class: "bad" }, turn.error));
  return node("article", { class: mine ? "mine" : "theirs", "aria-label": mine ? word("you") : turn.model || word("model") },
    node("h2", {}, mine ? word("you") : turn.model || word("model")), body, tools);
};

// What came at once has no speed.
const lengthOf = ({ tokens, seconds, first }) => [
  word("tokens", tokens),
  ...(tokens > 1 && seconds - first > 0.005 ? [word("speed", ((tokens - 1) / (seconds - first)).toFixed(1))] : []),
];

const howItWent = (how) => {
  const parts = how.tokens ? [...lengthOf(how), word("first", how.first.toFixed(2))] : [];
  if (how.end === "length") parts.push(word("cut"));
  if (how.end === "stopped") parts.push(word("stopped"));
  return parts.join(" · ");
};

// Exchanges what has changed and leaves the rest: a selection and a button that was pressed stay.
const redraw = (body, fresh) => {
  fresh.forEach((one, at) => {
    const old = body.childNodes[at];
    if (!old) body.append(one);
    else if (!old.isEqualNode(one)) old.replaceWith(one);
  });
  while (body.childNodes.length > fresh.length) body.lastChild.remove();
};

const edit = (at) => {
  const shown = $("log").children[at];
  const area = node("textarea", { rows: "3", "aria-label": word("edit") });
  area.value = talk.turns[at].content;
  const done = button("save", () => { const text = area.value.trim(); if (text) { talk.turns.length = at; send(text); } });
  const body = shown.querySelector(".body");
  body.replaceChildren(area, node("div", { class: "tools" }, done, button("cancel", showTurns)));
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !event.isComposing) { event.stopPropagation(); showTurns(); }
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); done.click(); }
  });
  area.focus();
};

const send = (text) => {
  if (!talk) talk = store.create();
  talk.turns.push({ role: "user", content: text });
  talk.title ||= text.slice(0, 60);
  talk.at = Date.now();
  answer(talk.turns.length);
};

// Writes the turn `at` anew; what was behind it is gone.
const answer = async (at) => {
  halt();
  const mine = talk;
  const own = new AbortController();
  running = own;
  mine.turns.length = at;
  const turn = { role: "assistant", content: "", model: $("model").value };
  const asked = mine.turns.slice();
  mine.turns.push(turn);
  busy(true);
  keep();
  showTalks();
  showTurns();
  let now = null;
  let drawn = 0;
  // Whoever leaves the page stops the answer; what the browser then says of the connection is no error.
  own.leave = () => { const { text, reasoning, ...how } = now ?? {}; turn.how = { ...how, end: "stopped" }; own.left = true; };
  const draw = () => {
    drawn = 0;
    follow((shown) => {
      redraw(shown.querySelector(".body"), answerNodes(turn));
      shown.querySelector(".how").textContent = lengthOf(now).join(" · ");
    });
  };
  const follow = (change) => {
    if (talk !== mine || mine.turns[at] !== turn) return;
    const near = $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 80;
    change($("log").children[at]);
    if (near) $("log").scrollTop = $("log").scrollHeight;
  };
  try {
    turn.how = await ask(asked, own.signal, (out) => { now = out; turn.content = out.text; turn.reasoning = out.reasoning; drawn ||= requestAnimationFrame(draw); });
    delete turn.how.text;
    delete turn.how.reasoning;
    if (running === own) say(word("done"));
  } catch (error) {
    if (!own.left) turn.error = error.message;
    if (running === own) say("");
  }
  cancelAnimationFrame(drawn);
  if (running === own) { running = null; busy(false); }
  keep();
  follow((shown) => shown.replaceWith(turnNode(turn, at)));
};

const keep = () => { if (store.saveTalks()) say(word("full"), true); };

const busy = (on) => {
  $("send").hidden = on;
  $("stop").hidden = !on;
  $("log").setAttribute("aria-busy", String(on));
  if (on) say(word("answering"));
};

const halt = () => { running?.abort(); running = null; busy(false); };

const choose = (one) => { if (one !== talk) halt(); talk = one; say(""); showTalks(); showTurns(); };

const grow = () => {
  const area = $("say");
  area.style.height = "auto";
  const wanted = area.scrollHeight + area.offsetHeight - area.clientHeight;
  if (area.value) area.style.height = `${Math.min(240, wanted)}px`;
  area.classList.toggle("long", wanted > 240);
};

const loadModels = async () => {
  try {
    const found = await models();
    const wanted = found.some((one) => one.id === settings.model) ? settings.model : found[0]?.id ?? "";
    $("model").replaceChildren(...found.map((one) => node("option", { value: one.id }, one.root === null ? word("adapter", one.id) : one.id)));
    if (!found.length) $("model").replaceChildren(node("option", { value: "" }, word("noModels")));
    $("model").value = settings.model = wanted;
    if ($("status").classList.contains("bad")) say("");
  } catch (error) { say(error.message, true); }
};

const begin = () => {
  frame(speak, loadModels);
  for (const name of FIELDS) {
    $(name).value = settings[name] ?? "";
    $(name).addEventListener("change", () => set(name, $(name).value));
  }
  $("model").addEventListener("change", () => set("model", $("model").value));
  $("new").addEventListener("click", () => { choose(null); fold(); $("say").focus(); });
  $("forget").addEventListener("click", () => {
    if (!confirm(word("forgetAsk"))) return;
    halt();
    store.talks = [];
    store.saveTalks();
    choose(null);
  });
  $("stop").addEventListener("click", () => running?.abort());
  $("say").addEventListener("input", grow);
  $("say").addEventListener("keydown", (event) => {
    // While a word is being composed (Chinese input), Enter chooses it.
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("composer").requestSubmit(); }
  });
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = $("say").value.trim();
    if (!text || running) return;
    $("say").value = "";
    grow();
    send(text);
  });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape" && !event.isComposing) { running?.abort(); fold(); } });
  NARROW.addEventListener("change", hint);
  addEventListener("pagehide", () => { if (running) { running.leave(); keep(); running.abort(); } });
  addEventListener("storage", (event) => {
    if (event.key !== `${KEY}talks`) return;
    talk = store.follow(talk, Boolean(running));
    showTalks();
    if (!running && !document.querySelector("#log textarea")) showTurns();
  });
  talk = store.talks[0] ?? null;
  speak();
  loadModels();
  $("say").focus();
};

begin();
