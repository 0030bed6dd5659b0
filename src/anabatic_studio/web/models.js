// Models of this machine: load them to chat, evaluate, fine-tune, export.

let modelRows = [];
let serverRows = [];

const changeServer = async (action, body) => {
  try { await post(`api/servers/${action}`, body); } catch (error) { say(error.message, true); }
  await refreshModels();
};

const showServers = () => {
  if (!hasChanged($("servers"), serverRows)) return;
  if (!serverRows.length) { $("servers").replaceChildren(node("p", { class: "fine" }, word("noServers"))); return; }
  const rows = serverRows.map((server) => [
    node("b", {}, server.name),
    node("span", {}, node("i", { class: `dot ${server.state}` }), ` ${word("serverStates")[server.state]} ${server.message}`),
    server.devices.join(", ") || word("cpu"),
    node("span", { class: "actions" }, ...(server.state === "ready" ? [node("a", { href: "chat" }, word("chatNow"))] : []), button("unload", () => changeServer("stop", { name: server.name }))),
  ]);
  $("servers").replaceChildren(table([word("model"), word("state"), word("devices"), ""], rows, "cards fit"));
};

const modelLink = (name, command, key, path) => node("a", { href: `#/new?command=${encodeURIComponent(command)}&${key}=${encodeURIComponent(path)}` }, word(name));

const showModels = () => {
  const wanted = $("find-model").value.trim().toLowerCase();
  const loaded = new Set(serverRows.map((server) => server.model));
  if (!hasChanged($("models"), [modelRows, [...loaded], wanted])) return;
  const shown = modelRows.filter((model) => `${model.path} ${model.type}`.toLowerCase().includes(wanted)).slice(0, 200);
  if (!shown.length) { $("models").replaceChildren(node("p", { class: "fine" }, word("noModels"))); return; }
  const rows = shown.map((model) => [
    model.path,
    model.adapter ? word("adapterOf", model.type) : model.type,
    word("modelKinds")[model.kind],
    word("ago", span(Math.max(0, Date.now() / 1000 - model.changed))),
    node("span", { class: "actions" },
      ...(loaded.has(model.path) ? [node("a", { href: "chat" }, word("chatNow"))] : [button("load", () => changeServer("start", { model: model.path }))]),
      modelLink("evaluate", "eval", "model", model.path), modelLink("fineTune", "sft", "model", model.path), modelLink("export", "export", "model", model.path)),
  ]);
  $("models").replaceChildren(table([word("model"), "", word("kind"), word("changed"), ""], rows, "cards fit"));
};

const refreshModels = async () => {
  serverRows = (await get("api/servers")).servers;
  showServers();
  showModels();
};

const enterModels = async () => {
  modelRows = (await get("api/models")).models;
  await refreshModels();
};
