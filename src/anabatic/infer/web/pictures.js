// Pictures of questions: picked, pasted or dropped, made smaller here, and shown.

const MOST_PICTURES = 16;
const MOST_BYTES = 64 * 2 ** 20;
const LONG_SIDE = 2048;
// Characters of data URIs: of one, and of all in a conversation. A request has 4 MiB unless the server says otherwise, a
// browser's storage five million characters.
const MOST_CHARS = 900_000, ALL_CHARS = 3_800_000, LEAST_CHARS = 50_000;

// Names of the served models that see.
let seeing = new Set();

// What goes with the next message; `ready` when all that was given has been read.
const picked = { list: [], ready: Promise.resolve() };

const blindProblem = () => (seeing.has($("model").value) ? "" : word("blind", $("model").value || word("model")));

const drawn = (bitmap, side) => {
  const scale = Math.min(1, side / Math.max(bitmap.width, bitmap.height));
  const canvas = node("canvas", { width: Math.max(1, Math.round(bitmap.width * scale)), height: Math.max(1, Math.round(bitmap.height * scale)) });
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.fillStyle = "#fff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas;
};

// Drawn afresh: upright, on white, and without the place where a photo was taken. PNG keeps the edges of what is no photo.
const encodePicture = (bitmap, isPhoto, chars) => {
  for (let side = Math.min(LONG_SIDE, Math.max(bitmap.width, bitmap.height)); ; side *= 0.8) {
    const canvas = drawn(bitmap, side);
    const exact = isPhoto ? "" : canvas.toDataURL("image/png");
    const url = exact && exact.length <= chars / 3 ? exact : canvas.toDataURL("image/jpeg", 0.9);
    if (url.length <= chars) return url;
  }
};

// The room for the next of `count` pictures: an equal share of what is left, with one share for those that come later.
const roomFor = (count) => {
  const used = [...talk?.pictures ?? [], ...picked.list].reduce((sum, url) => sum + url.length, 0);
  return Math.max(LEAST_CHARS, Math.min(MOST_CHARS, (ALL_CHARS - used) / (count + 1)));
};

const readPicture = async (file, chars) => {
  if (file.size > MOST_BYTES) throw new Error(word("pictureLarge", file.name));
  let bitmap;
  try { bitmap = file.type.startsWith("image/svg") ? null : await createImageBitmap(file); }
  catch { bitmap = null; } // what the browser cannot decode
  if (!bitmap) throw new Error(word("noPicture", file.name));
  try { return encodePicture(bitmap, file.type === "image/jpeg", chars); }
  finally { bitmap.close(); }
};

const takePictures = async (files) => {
  let problem = blindProblem();
  if (problem) { say(problem, true); return; }
  sayWord("readingPictures");
  for (const [at, file] of files.entries()) {
    if (picked.list.length >= MOST_PICTURES) { problem ||= word("tooManyPictures", MOST_PICTURES); break; }
    try { picked.list = [...picked.list, await readPicture(file, roomFor(files.length - at))]; }
    catch (error) { problem ||= error.message; }
    showPicked();
  }
  say(problem, Boolean(problem));
};

// One after the other: their order is that in which they were given.
const pick = (files) => { picked.ready = picked.ready.then(() => takePictures(files)); };

const enlarge = (url, label) => {
  const box = node("dialog", { class: "large", "aria-label": label }, node("img", { src: url, alt: label }));
  box.addEventListener("click", () => box.close());
  box.addEventListener("keydown", (event) => event.stopPropagation()); // its Escape stops no answer
  box.addEventListener("close", () => box.remove());
  document.body.append(box);
  box.showModal();
};

// `drop`, if given, takes it away again.
const pictureNode = (url, at, drop) => {
  const label = word("picture", at + 1);
  const open = () => node("button", { type: "button", class: "plain", "aria-label": label, onclick: () => enlarge(url, label) }, node("img", { src: url, alt: "", draggable: "false" }));
  const out = node("span", { class: "picture" }, url ? open() : node("span", { class: "fine" }, word("pictureLost")));
  if (drop) out.append(node("button", { type: "button", class: "icon", title: word("dropPicture", at + 1), "aria-label": word("dropPicture", at + 1), onclick: () => drop(at) }, "✕"));
  return out;
};

const shownPictures = (list) => node("div", { class: "pictures" }, ...list.map((url, at) => pictureNode(url, at)));

// The next picture, or the text, has the focus when one is taken away.
const fillPictures = (box, list, drop) => {
  box.replaceChildren(...list.map((url, at) => pictureNode(url, at, (place) => {
    drop(place);
    const others = [...box.querySelectorAll(".icon")];
    (others[place] ?? others.at(-1) ?? box.closest("form").querySelector("textarea")).focus();
  })));
  box.hidden = !list.length;
};

const showPicked = () => fillPictures($("pictures"), picked.list, (place) => { picked.list = picked.list.toSpliced(place, 1); showPicked(); });

// Those of a question that is edited; `list` changes.
const keptPictures = (list) => {
  const box = node("div", { class: "pictures", role: "group", "aria-label": word("pictures") });
  const fill = () => fillPictures(box, list, (place) => { list.splice(place, 1); fill(); });
  fill();
  return box;
};

const listenToPictures = () => {
  const main = document.querySelector("main");
  const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
  const mark = (isOver) => $("composer").classList.toggle("over", isOver);
  $("add").addEventListener("click", () => $("files").click());
  $("files").addEventListener("change", () => { pick([...$("files").files]); $("files").value = ""; backToMessage(); });
  $("composer").addEventListener("paste", (event) => {
    const { files, types } = event.clipboardData;
    // Office programs add a picture of the text that they copy.
    if (!files.length || types.includes("text/html") && types.includes("text/plain")) return;
    event.preventDefault();
    pick([...files]);
  });
  // Where a file is not taken, the browser would leave the page for it.
  main.addEventListener("dragover", (event) => { if (hasFiles(event)) { event.preventDefault(); mark(!blindProblem()); } });
  main.addEventListener("dragleave", (event) => { if (!main.contains(event.relatedTarget)) mark(false); });
  main.addEventListener("drop", (event) => { if (hasFiles(event)) { event.preventDefault(); mark(false); pick([...event.dataTransfer.files]); } });
};
