// Answers while they are written: in a comparison two at a time.

// Each has its conversation `talk`, the index `at` of its turn, its `column` in a comparison, and how to `abort` it.
const runs = new Set();

const isRunning = (at) => [...runs].some((run) => run.talk === talk && run.at === at);

const showBusy = () => {
  $("send").hidden = runs.size > 0;
  $("stop").hidden = !runs.size;
  $("log").setAttribute("aria-busy", String(runs.size > 0));
};

const stopAll = () => { for (const run of runs) run.abort(); };

// Stops answers, those of a column or all, and does not wait for their end.
const halt = (column) => {
  for (const run of runs) if (column === undefined || run.column === column) { run.abort(); runs.delete(run); }
  showBusy();
};

const keep = () => { const lost = store.saveTalks(); if (lost) sayWord(lost, true); };

// Asks for an answer below each of some turns of the conversation that is shown.
const askBelow = (places) => {
  for (const { column } of places) halt(column);
  talk.at = Date.now();
  const fresh = places.map(({ parent, column, second }) => {
    const control = new AbortController();
    const at = addTurn(talk, parent, { role: "assistant", content: "", model: modelOf(column) }, second);
    return { talk, at, column, signal: control.signal, abort: () => control.abort() };
  });
  for (const run of fresh) runs.add(run);
  showBusy();
  sayWord("answering");
  keep();
  showTalks();
  showTurns();
  fresh.forEach(follow);
};

// What has come so far becomes part of the turn; marks of the reader on a call stay.
const takeParts = (turn, { content, reasoning, calls }) => {
  Object.assign(turn, { content, reasoning });
  if (calls.length) turn.calls = calls.map((call, at) => Object.assign(turn.calls?.[at] ?? {}, call));
};

// Changes what is shown of a turn, if it is shown; who reads the end keeps reading the end.
const change = (run, act) => {
  const shown = run.talk === talk && articleOf(run.at);
  if (!shown) return;
  const isNear = $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 80;
  act(shown);
  if (isNear) $("log").scrollTop = $("log").scrollHeight;
};

const showEnd = (run) => change(run, (shown) => {
  const hadFocus = shown.contains(document.activeElement);
  const fresh = turnNode([run.at], columnOf(run.talk, run.at));
  shown.replaceWith(fresh);
  if (hadFocus) fresh.querySelector("button")?.focus();
});

const follow = async (run) => {
  const turn = run.talk.turns[run.at];
  let now = null;
  let frame = 0;
  // Whoever leaves the page stops the answer; what the browser then says of the connection is no error.
  run.leave = () => { turn.how = { ...now, end: "stopped" }; run.isLeft = true; };
  const draw = () => {
    frame = 0;
    change(run, (shown) => {
      redraw(shown.querySelector(".body"), answerNodes(turn, true));
      shown.querySelector(".how").textContent = lengthOf(now).join(" · ");
    });
  };
  const take = (answer) => { now = answer.how; takeParts(turn, answer.parts()); frame ||= requestAnimationFrame(draw); };
  try { turn.how = await ask(lineage(run.talk, turn.parent), turn.model, run.signal, take); }
  catch (error) { if (!run.isLeft) turn.error = error.message; }
  cancelAnimationFrame(frame);
  if (runs.delete(run) && !runs.size) { if (turn.error) say(""); else if (!$("status").classList.contains("bad")) sayWord("done"); };
  showBusy();
  keep();
  showEnd(run);
};
