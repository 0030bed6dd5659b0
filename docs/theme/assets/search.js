// The search of the site, as a worker: answers questions, where the theme's own wants every word on one page.
//
// It speaks the theme's protocol: {type: 0, data: index} -> {type: 1}; {type: 2, data: query} -> {type: 3, data: result}.
// Sections are ranked by BM25 over title, heading of the page and text (Robertson and Zaragoza, "The Probabilistic
// Relevance Framework: BM25 and Beyond", 2009); any word may match, rare words count more. Words are stemmed, Chinese
// is read in pairs of characters, and search-words.js adds what else a word is called.
"use strict";
importScripts("search-words.js");

const FIELDS = { title: 5, page: 2.5, text: 1 };
const SATURATION = 1.2;
const LENGTH = 0.6;
const OF_PAGE = 0.35; // what the other sections of a page add to one
const AGAIN = 0.75; // a second section of the same page counts so much less
const LISTS = { "reference/": 0.6, "guides/migration-guides": 0.75, "concepts/mistakes": 0.9, index: 0.85 }; // they name all
const PREFIX = 0.6;
const SLIP = 0.5;
const WORD = /[\p{Script=Han}]+|[\p{L}\p{N}]+(?:[._-][\p{L}\p{N}]+)*/gu;
const HAN = /\p{Script=Han}/u;

function stem(word) {
  if (word.length < 4 || /[^a-z]/.test(word)) return word;
  let text = word;
  if (text.endsWith("ies")) text = `${text.slice(0, -3)}y`;
  else if (/(?:ss|sh|ch|x|z)es$/.test(text)) text = text.slice(0, -2);
  else if (/[^su]s$/.test(text)) text = text.slice(0, -1);
  const bare = text.replace(/(?:ing|ed)$/, "");
  if (bare !== text && bare.length > 2 && /[aeiouy]/.test(bare)) text = bare.replace(/([^aeiouls])\1$/, "$1");
  return text.length > 4 ? text.replace(/e$/, "") : text;
}

// Yields [term, start, end] of a text; what stands between < and > is passed over.
function* terms(text) {
  const plain = text.replace(/<[^>]*>/g, (tag) => " ".repeat(tag.length)).toLowerCase();
  for (const { 0: word, index } of plain.matchAll(WORD)) {
    if (HAN.test(word)) {
      if (word.length === 1) yield [word, index, index + 1];
      for (let at = 0; at + 1 < word.length; at++) yield [word.slice(at, at + 2), index + at, index + at + 2];
      continue;
    }
    const parts = word.split(/([._-])/);
    yield [parts.map(stem).join(""), index, index + word.length];
    let at = index;
    for (const part of parts) {
      if (/[\p{L}\p{N}]/u.test(part) && part !== word) yield [stem(part), at, at + part.length];
      const name = /^([a-z]{3,})\d+$/.exec(part); // qwen3 is a qwen, too
      if (name) yield [stem(name[1]), at, at + name[1].length];
      at += part.length;
    }
  }
}

function counted(text) {
  const counts = new Map();
  for (const [term] of terms(text)) counts.set(term, (counts.get(term) || 0) + 1);
  return counts;
}

const normal = (text) => [...terms(text)].map(([term]) => term).join(" ");

function build(index) {
  const sections = [];
  const pages = new Map();
  for (const [id, item] of index.items.entries()) {
    const page = item.location.split("#")[0];
    const heading = pages.get(page) || `${item.title} ${(item.path || []).slice(-1)}`;
    pages.set(page, heading);
    const found = { title: counted(item.title), page: counted(heading), text: counted(item.text) };
    let length = 0;
    for (const count of found.text.values()) length += count;
    sections.push({ id, page, item, found, length, name: normal(item.title), first: !item.location.includes("#") });
  }
  const documents = new Map();
  for (const { found } of sections) {
    for (const term of new Set([...found.title.keys(), ...found.text.keys()])) {
      documents.set(term, (documents.get(term) || 0) + 1);
    }
  }
  const mean = sections.reduce((sum, one) => sum + one.length, 0) / sections.length;
  return { sections, documents, mean, items: index.items };
}

function near(left, right) {
  // True if one letter more, less, other, or two changed about, make one word of the other.
  if (Math.abs(left.length - right.length) > 1) return false;
  let at = 0;
  while (at < left.length && left[at] === right[at]) at++;
  const [a, b] = [left.slice(at), right.slice(at)];
  return a.slice(1) === b.slice(1) || a.slice(1) === b || a === b.slice(1) || (a[0] === b[1] && a[1] === b[0] && a.slice(2) === b.slice(2));
}

// The words of a question: [{alike: Map(term -> weight)}], one for each that counts.
function asked(input, store) {
  let text = ` ${input.toLowerCase()} `;
  for (const phrase of HABITS.silent) text = text.split(phrase).join(" ");
  const found = new Map();
  for (const [term, , end] of terms(text)) if (!HABITS.stop.has(term) && !found.has(term)) found.set(term, end);
  const open = /\S$/.test(input) ? text.trimEnd().length : -1; // the last word may not be typed out
  const words = [];
  for (const [term, end] of found) {
    const alike = new Map([[term, 1]]);
    if (end === open && term.length > 1 && !HAN.test(term)) {
      for (const other of store.documents.keys()) if (other !== term && other.startsWith(term)) alike.set(other, PREFIX);
    }
    if (alike.size === 1 && !store.documents.has(term) && term.length > 3 && !HAN.test(term)) {
      for (const other of store.documents.keys()) if (near(term, other)) alike.set(other, SLIP);
    }
    words.push({ alike, limit: store.documents.has(term) ? rarity(store, term) : Infinity });
  }
  for (const [pattern, others, weight = 0.8] of HABITS.also) {
    if (!pattern.test(text)) continue;
    for (const [term] of terms(others)) {
      if (!found.has(term)) words.push({ alike: new Map([[term, weight]]), added: true });
    }
  }
  return words;
}

function rarity(store, term) {
  const count = store.documents.get(term) || 0;
  return Math.log(1 + (store.sections.length - count + 0.5) / (count + 0.5));
}

function weigh(store, section, words) {
  const long = 1 - LENGTH + (LENGTH * section.length) / store.mean;
  let score = 0;
  let matched = 0;
  let whole = 0;
  for (const { alike, added, limit = Infinity } of words) {
    let best = 0;
    let rare = 0;
    for (const [term, weight] of alike) {
      let count = 0;
      for (const [field, share] of Object.entries(FIELDS)) {
        const times = section.found[field].get(term) || 0;
        count += field === "text" ? (times * share) / long : Math.min(times, 1) * share;
      }
      const worth = weight * Math.min(rarity(store, term), limit);
      rare = Math.max(rare, worth);
      if (count) best = Math.max(best, (worth * count * (SATURATION + 1)) / (count + SATURATION));
    }
    score += best;
    if (!added) whole += rare;
    if (best && !added) matched += rare;
  }
  return score * (0.35 + 0.65 * (whole ? matched / whole : 1));
}

function ranked(store, input) {
  const words = asked(input, store);
  if (!words.length) return { words, order: [] };
  const name = normal(input);
  const scores = store.sections.map((section) => weigh(store, section, words));
  const pages = new Map();
  for (const [at, section] of store.sections.entries()) {
    const some = pages.get(section.page) || [];
    some.push(scores[at]);
    pages.set(section.page, some);
  }
  for (const [page, some] of pages) {
    some.sort((left, right) => right - left);
    pages.set(page, some.slice(0, 3).reduce((sum, one) => sum + one, 0) / 3);
  }
  const order = [];
  for (const [at, section] of store.sections.entries()) {
    if (!scores[at]) continue;
    let score = scores[at] + OF_PAGE * pages.get(section.page);
    if (section.name === name) score *= section.first ? 4 : 3;
    for (const [start, share] of Object.entries(LISTS)) if (section.page.startsWith(start)) score *= share;
    order.push({ section, score });
  }
  order.sort((left, right) => right.score - left.score);
  const seen = new Map();
  for (const one of order) {
    const times = seen.get(one.section.page) || 0;
    seen.set(one.section.page, times + 1);
    one.score *= AGAIN ** times;
  }
  order.sort((left, right) => right.score - left.score);
  return { words, order };
}

function marked(text, wanted) {
  const ranges = [];
  for (const [term, start, end] of terms(text)) {
    const last = ranges[ranges.length - 1];
    if (!wanted.has(term) || (last && last.start >= start && last.end >= end)) continue;
    if (last && start < last.end) {
      last.end = Math.max(last.end, end);
      last.value = last.end - last.start;
    } else ranges.push({ start, end, value: end - start });
  }
  return { ranges: ranges.slice(0, 50) };
}

function answer(store, query) {
  const { words, order } = ranked(store, typeof query.input === "string" ? query.input : "");
  const wanted = new Set(words.flatMap(({ alike }) => [...alike.keys()]));
  const page = query.page || { from: 0 };
  const size = page.size || 10;
  const from = page.from || 0;
  const items = order.slice(from, from + size).map(({ section }) => ({
    id: section.id,
    matches: ["title", "text"]
      .map((field) => ({ field, value: { highlight: marked(section.item[field], wanted) } }))
      .filter(({ value }) => value.highlight.ranges.length),
  }));
  const at = (start) => (start >= 0 && start < order.length ? { id: page.id, size, from: start } : undefined);
  return { items, query: { values: [] }, pagination: { total: order.length, prev: at(from - size), next: at(from + size) } };
}

let store = null;
self.onmessage = ({ data: message }) => {
  try {
    if (message.type === 0) {
      store = build(message.data);
      self.postMessage({ type: 1 });
    } else if (message.type === 2) self.postMessage({ type: 3, data: answer(store, message.data) });
  } catch (error) {
    console.error(error);
    self.postMessage({ type: 4 });
  }
};
