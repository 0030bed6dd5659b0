// The queue: jobs with their state, what can be done with them, and the end of their log.

let openJob = null; // {id, offset}
let jobRows = [];

const confirmed = (pressed, act) => {
  if (pressed.dataset.sure) { delete pressed.dataset.sure; act(); return; }
  const text = pressed.textContent;
  pressed.dataset.sure = "1";
  pressed.textContent = word("sure");
  setTimeout(() => { if (pressed.dataset.sure) { delete pressed.dataset.sure; pressed.textContent = text; } }, 3000);
};

const changeJob = async (id, action, body = {}) => {
  try { await post(`api/jobs/${id}/${action}`, body); } catch (error) { say(error.message, true); }
  await refreshQueue();
};

const jobActions = (job, index) => {
  const ended = ["finished", "failed", "stopped", "lost"].includes(job.state);
  const actions = [button("openLog", () => { location.hash = `#/queue/${job.id}`; })];
  if (job.runs.length) actions.push(node("a", { href: `#/runs/${job.runs.slice(-MOST).join(",")}` }, word("openRun")));
  if (job.state === "queued" && index > 0) actions.push(button("first", () => changeJob(job.id, "move", { before: jobRows[0].id })));
  if (["queued", "running"].includes(job.state)) actions.push(button("stop", () => changeJob(job.id, "stop")));
  if (job.state === "stopping") actions.push(button("kill", (pressed) => confirmed(pressed, () => changeJob(job.id, "stop"))));
  if (ended) actions.push(button(job.state === "finished" ? "restart" : "resume", () => changeJob(job.id, "restart")));
  actions.push(node("a", { href: `#/new?command=${encodeURIComponent(job.command)}&job=${job.id}` }, word("edit")));
  if (ended || job.state === "queued") actions.push(button("remove", (pressed) => confirmed(pressed, () => changeJob(job.id, "remove"))));
  return node("span", { class: "actions" }, ...actions);
};

const jobTimes = (job) => {
  if (!job.started) return "";
  return span((job.ended ?? Date.now() / 1000) - job.started);
};

// What is drawn anew under the pointer loses the click: only what has changed is redrawn.
const drawn = new WeakMap();
const hasChanged = (target, state) => {
  const key = JSON.stringify([language, state]);
  if (drawn.get(target) === key) return false;
  drawn.set(target, key);
  return true;
};

const showJobs = () => {
  const active = document.activeElement;
  if (!hasChanged($("jobs"), [jobRows, openJob?.id])) {
    for (const job of jobRows) document.getElementById(`took-${job.id}`).textContent = jobTimes(job);
    return;
  }
  if (!jobRows.length) { $("jobs").replaceChildren(node("p", { class: "fine" }, word("noJobs"))); return; }
  const cell = (name, ...content) => node("td", { "data-name": name }, ...content);
  const rows = jobRows.map((job, index) => node("tr", { class: job.id === openJob?.id ? "open" : "" },
    cell("", String(job.id)),
    cell(word("job"), node("b", {}, job.name), " ", node("span", { class: "fine" }, job.command)),
    cell(word("state"), node("i", { class: `dot ${job.state}` }), ` ${word("jobStates")[job.state]}`, ...(job.message ? [node("p", { class: "fine" }, job.message)] : [])),
    cell(word("devices"), job.devices.length ? job.devices.join(", ") : job.state === "running" ? word("cpu") : ""),
    node("td", { "data-name": word("took"), id: `took-${job.id}` }, jobTimes(job)),
    cell("", jobActions(job, index))));
  const head = ["", word("job"), word("state"), word("devices"), word("took"), ""].map((name) => node("th", { scope: "col" }, name));
  const focused = active?.closest?.("#jobs") ? [...$("jobs").querySelectorAll("a, button")].indexOf(active) : -1;
  $("jobs").replaceChildren(node("div", { class: "wide" }, node("table", { class: "cards" }, node("thead", {}, node("tr", {}, ...head)), node("tbody", {}, ...rows))));
  if (focused >= 0) [...$("jobs").querySelectorAll("a, button")][focused]?.focus();
};

const followLog = async () => {
  if (!openJob) return;
  const { id } = openJob;
  const { text, offset } = await get(`api/jobs/${id}/log?offset=${openJob.offset}`);
  if (openJob?.id !== id) return;
  const pre = $("job-log-text");
  const atEnd = pre.scrollTop + pre.clientHeight >= pre.scrollHeight - 20;
  if (offset < openJob.offset) pre.textContent = "";
  if (text) pre.textContent = (pre.textContent + text).slice(-200000).replace(/[^\n]*\r(?!\n)/g, ""); // progress bars overwrite their line
  openJob.offset = offset;
  if (atEnd) pre.scrollTop = pre.scrollHeight;
};

const openJobLog = (id) => {
  if (openJob?.id === id) return;
  openJob = id === null ? null : { id, offset: 0 };
  $("job-log-text").textContent = "";
  $("job-log").hidden = id === null;
};

const refreshQueue = async () => {
  const { jobs } = await get("api/jobs");
  jobRows = jobs;
  showJobs();
  const job = jobs.find((each) => each.id === openJob?.id);
  if (openJob && !job) openJobLog(null);
  if (job) $("job-log-title").textContent = `${job.name} · ${word("jobStates")[job.state]}`;
  await followLog();
};

const enterQueue = (id) => openJobLog(id);
