// The plan beside the form: a memory bar of a device, time, and other strategies.

let planRequest = 0;

const seconds = (value) => (value < 1 ? `${(1000 * value).toPrecision(3)} ms` : value < 90 ? `${value.toPrecision(3)} ${word("units").s}` : span(value));

const memoryBar = (plan) => {
  const total = Math.max(plan.room_bytes, plan.needs_bytes);
  const parts = Object.entries(plan.parts).filter(([, size]) => size > 0);
  const rest = plan.needs_bytes - parts.reduce((sum, [, size]) => sum + size, 0);
  const pieces = [...parts, ...(rest > 0 ? [["buffers, fragments", rest]] : [])].map(([name, size]) => [word("memoryParts")[name] ?? name, size]);
  const bar = node("div", { class: `memory-bar ${plan.fits ? "" : "over"}`, role: "img", "aria-label": pieces.map(([name, size]) => `${name} ${bytes(size)}`).join(", ") });
  const legend = node("ul", { class: "bar-legend" });
  pieces.forEach(([name, size], index) => {
    const colour = `c${1 + (index % 8)}`;
    const piece = node("i", { class: colour, title: `${name}: ${bytes(size)}` });
    piece.style.width = `${(100 * size) / total}%`;
    bar.append(piece);
    legend.append(node("li", {}, node("i", { class: colour }), `${name} ${bytes(size)}`));
  });
  const mark = node("b", { title: bytes(plan.room_bytes) });
  mark.style.left = `${(100 * plan.room_bytes) / total}%`;
  bar.append(mark);
  return [bar, legend];
};

const planFigures = (plan) => {
  const entries = [
    [plan.fits ? word("fits") : word("fitsNot"), word("ofDevice", bytes(plan.needs_bytes), bytes(plan.room_bytes))],
    [word("tokensPerS"), short(plan.tokens_per_s)],
    [word("perStep"), seconds(plan.step_seconds)],
    [word("wholeRun"), plan.run_seconds ? seconds(plan.run_seconds) : word("unknownTime")],
    [word("parameters"), plan.trained === plan.parameters ? short(plan.parameters) : `${short(plan.parameters)}, ${short(plan.trained)} ${word("trained")}`],
    ["MFU", percent(plan.mfu)],
  ];
  return node("dl", { class: "figures" }, ...entries.map(([name, value], index) => node("div", { class: index || plan.fits ? "" : "bad" }, node("dt", {}, name), node("dd", {}, value))));
};

const describeStrategy = (plan) => [plan.strategy, plan.offload ? "offload" : "", `recompute ${plan.recompute}`, `${plan.micro_batch_tokens} × ${plan.micro_steps}`].filter(Boolean).join(", ");

const otherStrategies = (plan, apply) => {
  const others = plan.others.filter((other) => describeStrategy(other) !== describeStrategy(plan)).slice(0, 4);
  if (!others.length) return [];
  const recompute = fieldNodes.has("model.recompute") ? "model.recompute" : "recompute";
  const rows = others.map((other) => [describeStrategy(other), bytes(other.needs_bytes), `${short(other.tokens_per_s)} ${word("tokensPerS")}`,
    button("use", () => apply({
      "parallel.strategy": other.strategy, [recompute]: other.recompute, "batch.micro_batch_tokens": other.micro_batch_tokens,
      ...(other.offload ? { "parallel.offload": "cpu" } : {}),
    }))]);
  return [node("h3", {}, word("faster")), table(["", "", "", ""], rows)];
};

// What a pipeline runs, in order; what is done and unchanged is skipped.
const showStages = (stages) => {
  const rows = stages.map((stage) => node("li", {}, node("b", {}, stage.name), " ", node("code", {}, stage.command), " ", node("span", { class: "fine" }, stage.title),
    ...(stage.done ? [" ", node("span", { class: "fine good" }, word("stageDone"))] : [])));
  $("plan").replaceChildren(node("h2", {}, word("stages")), rows.length ? node("ol", { class: "stages" }, ...rows) : node("p", { class: "fine" }, word("noStages")));
};

const chipSelect = node("select", {});
const showPlan = (plan, apply) => {
  const head = node("div", { class: "row" }, node("h2", {}, word("plan")), chipSelect);
  chipSelect.setAttribute("aria-label", word("planFor"));
  chipSelect.options[0].textContent = word("here");
  if (plan.error) {
    $("plan").replaceChildren(head, node("p", { class: "fine" }, checked.problems.length ? word("planLater") : `${plan.error}. ${plan.hint}`));
    return;
  }
  if (!plan.parts) { $("plan").replaceChildren(node("p", { class: "fine" }, word("noPlan"))); return; }
  const where = `${plan.nodes > 1 ? `${plan.nodes} × ` : ""}${plan.npus} × ${plan.chip}`;
  const assumed = plan.assumed.length ? [node("p", { class: "fine" }, `${word("assumed")}: ${plan.assumed.join("; ")}`)] : [];
  $("plan").replaceChildren(head, node("p", { class: "fine" }, `${where}: ${describeStrategy(plan)}`), ...memoryBar(plan), planFigures(plan), ...assumed, ...otherStrategies(plan, apply));
};

const loadPlan = async (command, text, apply) => {
  const mine = ++planRequest;
  try {
    const plan = await post("api/plan", { command, text, chip: chipSelect.value });
    if (mine === planRequest) showPlan(plan, apply);
  } catch (error) { if (mine === planRequest) $("plan").replaceChildren(node("p", { class: "bad" }, error.message)); }
};
