// The page: what its buttons do, and the start.

import { ApiError, generate, loadModel, pause, serverState, setKey, untilState } from "./api.js";
import { psnrOf, psnrText, shownPair, showEntry } from "./compare.js";
import { $, make, setStatus, show } from "./dom.js";
import * as form from "./form.js";
import { factsOf, findEntry, openHistory, saveEntry, showThumbnails } from "./history.js";
import { againOf, allOf, pairOf, planOf, runImages, shareOf, withTimes } from "./run.js";
import { keyOf } from "./settings.js";
import { text, translate } from "./texts.js";
import { startViewer } from "./zoom.js";

const REPEATS = 3; // of "Measure again"
const TERMS = ["token", "ratio", "interlace", "psnr", "ssim"];

let model = null; // as in GET /v1/models
let controller = null; // AbortController of the current run
let current = null; // the entry that is shown
let following = true; // whether to show the images of the run: false once another entry is selected
let watching = false; // whether the page waits for a server that cannot be reached

// Showing an entry

async function showCurrent(entry) {
  current = entry;
  await showEntry(entry, model, (ratio) => pick(entry, ratio));
}

/** Show an image at the divider, in place of the image that was picked first. */
async function pick(entry, ratio) {
  const pair = shownPair(entry);
  const different = (shown) => shown !== ratio;
  const latest = entry.shown.filter((shown) => pair.includes(shown)).findLast(different) ?? pair.find(different);
  entry.shown = latest === undefined ? [ratio] : [latest, ratio];
  await showCurrent(entry);
}

async function selectEntry(entry) {
  following = false;
  form.clearErrors();
  const [, ratio] = shownPair(entry);
  form.fillForm({ negative_prompt: "", ...entry.settings, tome_ratio: ratio }, entry.source);
  form.writeLink();
  showThumbnails(entry);
  await showCurrent(entry);
  if (!controller) setStatus(text("shown", factsOf(entry)));
  $("result").scrollIntoView({ block: "start", behavior: "smooth" });
}

/** The entry of these settings since the server's start, or a new one. */
function entryOf({ tome_ratio, ...settings }, source) {
  const key = keyOf(settings, model.created, source?.name);
  const id = `${Date.now()}-${form.randomSeed()}`;
  const created = { id, key, model: model.id, time: Date.now(), settings, source, images: {}, shown: [] };
  return findEntry((entry) => entry.key === key) ?? created;
}

// Generating

/**
 * Generate the wanted images that are not there yet.
 * @param wanted from the ratio in the form to ratios; or ratios, which are generated `again` to time them
 */
async function run(wanted, again = false) {
  if (controller || !model) return;
  const settings = again ? current.settings : form.readForm();
  if (!settings) {
    setStatus("");
    return;
  }
  if (!again) form.writeLink();
  const entry = again ? current : entryOf(settings, form.sourceImage());
  const all = again ? wanted : wanted(settings.tome_ratio);
  const ratios = again ? wanted : planOf(all, model.tome_ratios, entry.images);
  if (!again) entry.shown = pairOf(settings.tome_ratio).toReversed(); // so that the next pick replaces the ratio
  if (ratios.length === 0) {
    await showCurrent(entry);
    showThumbnails(entry);
    setStatus(text("nothingNew"));
    return;
  }
  controller = new AbortController();
  const { signal } = controller;
  following = true;
  setBusy(true);
  try {
    const image = entry.source ? { image: await form.base64Of(entry.source.blob) } : {};
    await runImages({
      ratios,
      generate: (ratio, onProgress) =>
        generate(
          { ...entry.settings, ...image, tome_ratio: ratio },
          { onProgress, onSilence, signal },
        ),
      onState: showProgress,
      onImage: async (ratio, result) => {
        const method = model.tome_methods[model.tome_ratios.indexOf(ratio)] ?? "";
        entry.images[ratio] = { ...withTimes(entry.images[ratio], result), method };
        await addImage(entry);
      },
      sleep: (seconds) => cancellable(pause(1000 * seconds), signal),
    });
    await showDone(entry, ratios.length, all.length > 2);
  } catch (error) {
    setStatus(error.name === "AbortError" ? text("cancelled") : "");
    await showError(error);
  } finally {
    controller = null;
    setBusy(false);
  }
}

/** Show an entry with a new image, unless another entry was selected since the start of the run. */
async function addImage(entry) {
  const isFirst = $("generated").hidden;
  const isShown = following || current === entry;
  await saveEntry(entry, isShown ? entry : current);
  if (!isShown) return;
  await showCurrent(entry);
  if (isFirst) $("result").scrollIntoView({ block: "nearest" });
}

function cancellable(promise, signal) {
  const aborted = new Promise((_, reject) => signal.addEventListener("abort", () => reject(signal.reason), { once: true }));
  return Promise.race([promise, aborted]);
}

async function showDone(entry, count, isMany) {
  const [a, b] = shownPair(entry);
  if (isMany) setStatus(text("doneAll", { count }));
  else if (a === b) setStatus(text("doneOne"));
  else setStatus(text("done", { psnr: psnrText(await psnrOf(entry, [a, b])) }));
}

const hasRatios = () => model.tome_ratios.filter((ratio) => ratio > 0).length > 1;

function setBusy(busy) {
  const hadFocus = ["generate", "all", "again", "cancel"].includes(document.activeElement?.id);
  show("cancel", busy);
  show("generate", !busy);
  show("all", !busy && hasRatios());
  $("again").disabled = busy;
  $("again").title = busy ? text("busy") : "";
  show("progress", busy);
  if (!busy) $("result-phase").textContent = "";
  $("result").ariaBusy = String(busy);
  if (hadFocus) $(busy ? "cancel" : "generate").focus({ preventScroll: true });
}

function showProgress(state) {
  // The status is read aloud when it changes: images and places in the queue, not each step.
  const { ratio, index, count, position, step, steps, wait } = state;
  const name = ratio === 0 ? text("generatingPlain") : text("generatingRatio", { ratio });
  if (wait) setStatus(text("retry", { seconds: wait }));
  else setStatus(position > 0 ? text("waiting", { position }) : name);
  const parts = [
    ...(count > 1 ? [text("ofImages", { index: index + 1, count })] : []),
    ...(steps > 0 && position === 0 ? [text("step", { step, steps })] : []),
  ];
  $("step").textContent = parts.join(" · ");
  $("result-phase").textContent = [$("phase").textContent, ...parts].join(" · "); // beside the images, on a phone
  const share = shareOf(state);
  if (share === null) $("bar").removeAttribute("value");
  else $("bar").value = share;
}

// A server that does not answer

function onSilence(silent) {
  show("silence", silent);
  $("silence").textContent = silent ? text("silent") : "";
}

/** Ask until the server is back, and read its model, which may be a different one. */
async function watch() {
  if (watching) return;
  watching = true;
  show("silence", true);
  $("silence").textContent = text("gone");
  await untilState((state) => state === "ready");
  watching = false;
  show("silence", false);
  try {
    const renewed = await loadModel();
    if (JSON.stringify({ ...renewed, created: 0 }) !== JSON.stringify({ ...model, created: 0 })) location.reload();
    model = renewed;
    form.renewModel(model);
    show("error", false);
    setStatus(text("back"));
  } catch (error) {
    await showError(error);
  }
}

async function showError(error) {
  if (error.name === "AbortError") return;
  if (!(error instanceof ApiError)) console.error(error);
  if (error.code === "wrongKey") {
    await askKey(true);
    return;
  }
  if (error.field) form.showServerError(error.field, error.values.message);
  $("error").textContent =
    error instanceof ApiError ? text(error.code, error.values) : text("failed", { message: error.message });
  show("error", true);
  if (model && ["unreachable", "interrupted"].includes(error.code)) watch();
}

// The key and the start

/** Ask for the key until the server accepts it. Resolves to false if the reader gives up. */
function askKey(wasWrong) {
  const dialog = $("key-dialog");
  $("key").value = "";
  $("key-error").textContent = wasWrong ? text("wrongKey") : "";
  dialog.showModal();
  return new Promise((resolve) => {
    const finish = (accepted) => {
      $("key-form").onsubmit = $("no-key").onclick = dialog.oncancel = null;
      $("key").value = "";
      dialog.close();
      show("error", !accepted);
      if (!accepted) {
        $("error").textContent = text("noKey");
        setStatus("");
      }
      resolve(accepted);
    };
    $("key-form").onsubmit = async (event) => {
      event.preventDefault();
      setKey($("key").value);
      try {
        model = await loadModel();
        finish(true);
      } catch (error) {
        $("key-error").textContent = error instanceof ApiError ? text(error.code, error.values) : error.message;
        $("key").select();
      }
    };
    $("no-key").onclick = () => finish(false);
    dialog.oncancel = (event) => {
      event.preventDefault();
      finish(false);
    };
  });
}

async function loadModelWithKey() {
  try {
    model = await loadModel();
    return true;
  } catch (error) {
    if (error.code === "wrongKey") return askKey(false);
    throw error;
  }
}

async function untilReady() {
  setStatus(text("loading"));
  for (;;) {
    const state = await serverState();
    if (state === "ready") return;
    setStatus(text(state === "loading" ? "loading" : state === null ? "unreachable" : "ended"));
    await pause(1000);
  }
}

function startGlossary() {
  const rows = TERMS.map((term) =>
    make("div", { id: `term-${term}` }, make("dt", { textContent: text(`term_${term}`) }), make("dd", { textContent: text(`about_${term}`).replaceAll("`", "") })),
  );
  $("terms").replaceChildren(...rows);
  for (const button of document.querySelectorAll(".term")) button.textContent = text(`term_${button.dataset.term}`);
  document.addEventListener("click", ({ target }) => {
    const term = target.closest?.(".term")?.dataset.term;
    if (!term) return;
    for (const row of rows) row.classList.toggle("wanted", row.id === `term-${term}`);
    $("glossary").showModal();
    $(`term-${term}`).scrollIntoView({ block: "nearest" });
  });
}

function onKey(event) {
  if (document.querySelector("dialog[open]")) return;
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    run(pairOf);
  } else if (event.key === "Escape" && controller && !document.fullscreenElement) {
    controller.abort();
  }
}

function startButtons() {
  $("settings").addEventListener("submit", (event) => {
    event.preventDefault();
    run(pairOf);
  });
  $("all").addEventListener("click", () => run(() => allOf(model.tome_ratios)));
  $("again").addEventListener("click", () => {
    const pair = shownPair(current);
    run(againOf(pair[0] === pair[1] ? [pair[0]] : pair, REPEATS), true);
  });
  $("cancel").addEventListener("click", () => controller?.abort());
  $("copy").addEventListener("click", async () => {
    const copied = await navigator.clipboard?.writeText($("link").href).then(() => true, () => false);
    $("copied").textContent = text(copied ? "copied" : "notCopied");
  });
  document.addEventListener("keydown", onKey);
}

async function start() {
  translate();
  startViewer();
  startGlossary();
  startButtons();
  try {
    await untilReady();
    if (!(await loadModelWithKey())) return;
    form.startForm(model);
    await openHistory(model.id, selectEntry);
    const isRestored = form.restoreLink();
    const settings = isRestored ? form.settingsOrNull() : null;
    if (settings) await showEarlier(settings);
    window.addEventListener("hashchange", form.restoreLink);
    for (const id of ["generate", "all"]) $(id).disabled = false;
    show("all", hasRatios());
    setStatus(text("ready"));
  } catch (error) {
    await showError(error);
  }
}

/** Show the entry of these settings, if the history has one. */
async function showEarlier({ tome_ratio, ...settings }) {
  const isEqual = (entry) => keyOf(entry.settings, null, null) === keyOf({ ...settings, strength: entry.settings.strength }, null, null);
  const entry = findEntry(isEqual);
  if (!entry) return;
  if (entry.source) form.fillForm({ ...entry.settings, tome_ratio }, entry.source);
  entry.shown = pairOf(tome_ratio).toReversed();
  showThumbnails(entry);
  await showCurrent(entry);
}

start();
