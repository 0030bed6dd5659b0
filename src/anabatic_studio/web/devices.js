// Devices of this machine, and who uses them.

const meter = (used, total, text) => {
  const share = total ? Math.max(0, Math.min(1, used / total)) : 0;
  const fill = node("i", {});
  fill.style.width = `${100 * share}%`;
  return node("div", { class: `meter ${share > 0.9 ? "high" : ""}` }, fill, node("span", {}, text));
};

const MIB = 1 << 20;
const deviceRow = (device, index, processes, reserved) => {
  const known = (value, unit) => (value === null || value === undefined ? "–" : `${+value.toPrecision(3)} ${unit}`);
  const total = device.hbm_total_mb || device.mem_total_mb;
  const used = device.hbm_total_mb ? device.hbm_used_mb : device.mem_used_mb;
  const mine = processes.filter((each) => each.npu_id === device.npu_id && (each.chip_id ?? device.chip_id) === device.chip_id);
  const owners = mine.map((each) => `${each.name ?? "process"} ${each.pid}${each.user ? ` (${each.user})` : ""}`);
  if (reserved.jobs.includes(index)) owners.unshift(word("thisQueue"));
  if (reserved.servers.includes(index)) owners.unshift(word("served"));
  const label = device.chip_id ? `${device.npu_id}.${device.chip_id}` : String(device.npu_id);
  const cells = [
    [word("device"), node("b", {}, label), " ", node("span", { class: "fine" }, device.name ?? device.kind)],
    [word("utilization"), device.util_pct === null ? "–" : meter(device.util_pct, 100, `${Math.round(device.util_pct)} %`)],
    [word("memory"), total ? meter(used ?? 0, total, `${bytes((used ?? 0) * MIB)} / ${bytes(total * MIB)}`) : "–"],
    [word("temperature"), known(device.temp_c, "°C")],
    [word("power"), known(device.power_w, "W")],
    [word("health"), device.health ?? "–"],
    [word("usedBy"), owners.join(", ") || (device.kind === "cpu" ? "–" : word("free"))],
  ];
  return node("tr", {}, ...cells.map(([name, ...content]) => node("td", { "data-name": name }, ...content)));
};

const refreshDevices = async () => {
  const found = await get("api/devices");
  if (found.error || !found.devices?.length) {
    $("devices").replaceChildren(node("p", { class: "fine" }, found.error ? `${found.error}. ${found.hint}` : word("noDevices")));
    return;
  }
  const head = ["device", "utilization", "memory", "temperature", "power", "health", "usedBy"].map((name) => node("th", { scope: "col" }, word(name)));
  const rows = found.devices.map((device, index) => deviceRow(device, device.logic_id ?? index, found.processes, found));
  const notes = found.notes.map((note) => node("p", { class: "fine" }, note));
  $("devices").replaceChildren(node("div", { class: "wide" }, node("table", { class: "cards" }, node("thead", {}, node("tr", {}, ...head)), node("tbody", {}, ...rows))), ...notes);
};
