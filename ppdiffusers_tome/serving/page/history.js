// Entries of the history: in IndexedDB, bounded, and as thumbnails. Without IndexedDB they are in memory only.

import { forget, nameOfRatio, ratiosOf, urlOf } from "./compare.js";
import { $, make, show } from "./dom.js";
import { LANGUAGE, text } from "./texts.js";

const MAX_ENTRIES = 30;
const MAX_BYTES = 100 * 2 ** 20;
const NAME = "ppdiffusers_tome";
const STORE = "entries";

/** The entries to remove, so that the newest ones stay within the bounds. Entries are oldest first. */
export function surplusOf(entries, maxEntries = MAX_ENTRIES, maxBytes = MAX_BYTES) {
  let bytes = 0;
  let count = 0;
  return entries.toReversed().filter((entry) => {
    bytes += Object.values(entry.images).reduce((sum, image) => sum + image.blob.size, entry.source?.blob.size ?? 0);
    return ++count > maxEntries || (count > 1 && bytes > maxBytes);
  });
}

let database = null;
let entries = []; // oldest first

const finished = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

const store = (mode) => database.transaction(STORE, mode).objectStore(STORE);

async function attempt(action) {
  if (!database) return;
  try {
    await action();
  } catch (error) {
    database = null; // full or forbidden: the entries are in memory
    console.warn(error.message);
    showHint();
  }
}

/** Read the entries of a model; the newest is the last. */
export async function openHistory(model, onSelect) {
  try {
    const opening = indexedDB.open(NAME, 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore(STORE, { keyPath: "id" });
    database = await finished(opening);
    const stored = await finished(store("readonly").getAll());
    entries = stored.filter((entry) => entry.model === model).sort((a, b) => a.time - b.time);
  } catch {
    database = null;
  }
  $("clear").addEventListener("click", () => confirm(text("clearSure")) && clearHistory());
  $("thumbnails").addEventListener("click", ({ target }) => {
    const button = target.closest("button");
    if (button) onSelect(entries.find((entry) => entry.id === button.dataset.id));
  });
  showThumbnails(null);
}

/** The latest entry that `isWanted` accepts. */
export function findEntry(isWanted) {
  return entries.findLast(isWanted);
}

/** Add an entry, or store its changes. */
export async function saveEntry(entry, current) {
  if (!entries.includes(entry)) entries.push(entry);
  const surplus = surplusOf(entries).filter((earlier) => earlier !== entry);
  entries = entries.filter((stored) => !surplus.includes(stored));
  surplus.forEach(forget);
  showThumbnails(current);
  await attempt(async () => {
    const write = store("readwrite");
    surplus.forEach(({ id }) => write.delete(id));
    await finished(write.put(entry));
  });
}

async function clearHistory() {
  entries.forEach((entry) => $("thumbnails").querySelector("[aria-current]")?.dataset.id !== entry.id && forget(entry));
  entries = [];
  showThumbnails(null);
  await attempt(() => finished(store("readwrite").clear()));
}

const timeOf = (entry) =>
  new Date(entry.time).toLocaleString(LANGUAGE, { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit" });

/** Ratios, seed and time of an entry, as texts. */
export function factsOf(entry) {
  const ratios = ratiosOf(entry).filter((ratio) => ratio > 0);
  const names = ratios.length ? text("ratioShort", { ratio: ratios.join(", ") }) : nameOfRatio(0);
  return { ratios: names, seed: entry.settings.seed, time: timeOf(entry) };
}

function showHint() {
  $("history-hint").textContent = text(database ? "historyHint" : "historyMemory", { count: MAX_ENTRIES });
}

/** Show all entries, the newest first, and mark the current one. */
export function showThumbnails(current) {
  show("history", entries.length > 0);
  showHint();
  const items = entries.toReversed().map((entry) => {
    const ratios = ratiosOf(entry);
    const facts = factsOf(entry);
    const prompt = entry.settings.prompt || text("noPrompt");
    const button = make("button", { type: "button" }, make("img", { src: urlOf(entry.images[ratios.at(-1)]), alt: "" }));
    button.dataset.id = entry.id;
    button.ariaLabel = button.title = text("thumbnail", { prompt: [...prompt].slice(0, 200).join(""), ...facts });
    if (entry === current) button.ariaCurrent = "true";
    button.append(make("bdi", { textContent: prompt }), make("span", { textContent: facts.ratios }));
    button.append(make("span", { textContent: `${text("seed")} ${facts.seed}` }), make("span", { textContent: facts.time }));
    return make("li", {}, button);
  });
  const focused = document.activeElement?.dataset?.id;
  $("thumbnails").replaceChildren(...items);
  if (focused) $("thumbnails").querySelector(`[data-id="${focused}"]`)?.focus({ preventScroll: true });
}
