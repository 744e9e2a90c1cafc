// The page: settings, drawing once plain and once merged, the comparison, and the history of this session.

import { ApiError, draw, loadModel, serverState, setKey } from "./api.js";
import { drawDifference, pixelsOf, psnr, ssim } from "./measures.js";
import { LANGUAGE, text, translate } from "./texts.js";

const MOST_ENTRIES = 50; // in the history
const FIELDS = ["prompt", "seed", "steps", "guidance_scale", "size", "tome_ratio"];
const INTEGERS = ["seed", "steps"];
const LABELS = { seed: "seed", steps: "steps", guidance_scale: "guidance" };

const $ = (id) => document.getElementById(id);
const show = (id, visible) => ($(id).hidden = !visible);
const number = (value, digits) =>
  value.toLocaleString(LANGUAGE, { minimumFractionDigits: digits, maximumFractionDigits: digits });

let model = null; // as in GET /v1/models
let controller = null; // of the drawing that runs
const entries = []; // of the history, oldest first

// Settings

function randomSeed() {
  return crypto.getRandomValues(new Uint32Array(1))[0];
}

function fillForm(values) {
  for (const name of FIELDS) {
    const value = values[name];
    if (value === undefined || value === null) continue;
    const field = $(name);
    if (field instanceof HTMLSelectElement && ![...field.options].some((option) => option.value === String(value))) {
      showFieldError(name, text("notExported", { value }));
    } else {
      field.value = value;
    }
  }
  showMethod();
}

/** The settings in the form; null, with a message at each wrong field, if one is not allowed. */
function readForm() {
  clearErrors();
  const values = { prompt: $("prompt").value, size: $("size").value, tome_ratio: Number($("tome_ratio").value) };
  const wrong = [];
  const count = [...values.prompt].length;
  if (count > model.prompt_characters) {
    wrong.push(["prompt", text("longPrompt", { count, limit: model.prompt_characters })]);
  }
  if ($("seed").value.trim() === "") $("seed").value = randomSeed();
  for (const [name, label] of Object.entries(LABELS)) {
    const typed = $(name).value.trim();
    const value = typed === "" ? NaN : Number(typed);
    const [low, high] = model.ranges[name];
    if (!(value >= low && value <= high) || (INTEGERS.includes(name) && !Number.isInteger(value))) {
      const message = INTEGERS.includes(name) ? "wholeNumber" : "number";
      wrong.push([name, text(message, { name: text(label), low, high })]);
    }
    values[name] = value;
  }
  for (const [name, message] of wrong) showFieldError(name, message);
  if (wrong.length) $(wrong[0][0]).focus();
  return wrong.length ? null : values;
}

function showFieldError(name, message) {
  $(`${name}-error`).textContent = message;
  $(name).setAttribute("aria-invalid", "true");
}

function clearErrors() {
  show("error", false);
  for (const name of FIELDS) {
    $(`${name}-error`).textContent = "";
    $(name).removeAttribute("aria-invalid");
  }
}

function showMethod() {
  const ratio = Number($("tome_ratio").value);
  const percent = text("percent", { percent: number(100 * ratio, 0) });
  $("method").textContent = ratio > 0 ? `${percent} ${methodOf(ratio)}` : "";
}

function methodOf(ratio) {
  return model.tome_methods[model.tome_ratios.indexOf(ratio)] ?? "";
}

function linkOf(settings) {
  return "#" + new URLSearchParams(FIELDS.map((name) => [name, settings[name]]));
}

function readLink() {
  const values = new URLSearchParams(location.hash.slice(1));
  clearErrors();
  fillForm(Object.fromEntries([...values].filter(([name]) => FIELDS.includes(name))));
}

// Drawing

async function onDraw(event) {
  event.preventDefault();
  if (controller) return;
  const settings = readForm();
  if (!settings) {
    $("phase").textContent = "";
    return;
  }
  controller = new AbortController();
  const hasPlain = model.tome_ratios.includes(0);
  const passes = [...(hasPlain ? ["plain"] : []), ...(settings.tome_ratio > 0 ? ["merged"] : [])];
  const entry = { settings, method: methodOf(settings.tome_ratio) };
  setBusy(true);
  try {
    for (const [index, name] of passes.entries()) {
      const phase = text(name === "plain" ? "drawingPlain" : "drawingMerged");
      const ratio = name === "plain" ? 0 : settings.tome_ratio;
      showProgress(phase, index, passes.length, { position: 0, step: 0, steps: settings.steps });
      const report = (progress) => showProgress(phase, index, passes.length, progress);
      entry[name] = await draw({ ...settings, tome_ratio: ratio }, report, controller.signal);
      entry[name].url = URL.createObjectURL(entry[name].blob);
    }
    await measure(entry);
    addEntry(entry);
    showEntry(entry);
    $("frame").scrollIntoView({ block: "nearest" });
    history.replaceState(null, "", linkOf(settings));
    const speed = entry.speedUp && number(entry.speedUp, 2);
    $("phase").textContent = speed ? text("done", { speed, psnr: psnrText(entry.psnr) }) : text("doneOne");
  } catch (error) {
    $("phase").textContent = error.name === "AbortError" ? text("cancelled") : "";
    for (const name of passes) if (entry[name]) URL.revokeObjectURL(entry[name].url);
    await showError(error);
  } finally {
    controller = null;
    setBusy(false);
  }
}

function setBusy(busy) {
  const hadFocus = [$("draw"), $("cancel")].includes(document.activeElement);
  show("cancel", busy);
  show("draw", !busy);
  show("progress", busy);
  $("result").ariaBusy = String(busy);
  if (hadFocus) $(busy ? "cancel" : "draw").focus();
}

function showProgress(phase, index, passes, { position, step, steps }) {
  // The status is read aloud when it changes: phases and places in the queue, not each step.
  const status = position > 0 ? text("waiting", { position }) : phase;
  if ($("phase").textContent !== status) $("phase").textContent = status;
  $("step").textContent = steps > 0 && position === 0 ? text("step", { step, steps }) : "";
  const bar = $("bar");
  if (steps > 0 || index > 0) bar.value = (index + (steps > 0 ? step / steps : 0)) / passes;
  else bar.removeAttribute("value"); // steps are not known
}

async function measure(entry) {
  const { plain, merged } = entry;
  if (!plain || !merged) return;
  entry.speedUp = plain.seconds / merged.seconds;
  entry.pixels = await Promise.all([pixelsOf(plain.blob), pixelsOf(merged.blob)]);
  entry.psnr = psnr(...entry.pixels);
  entry.ssim = ssim(...entry.pixels);
}

async function showError(error) {
  if (error.name === "AbortError") return;
  if (!(error instanceof ApiError)) console.error(error);
  if (error.code === "wrongKey") {
    await askKey(true);
    return;
  }
  const isField = error.field && FIELDS.includes(error.field);
  if (isField) {
    showFieldError(error.field, error.values.message);
    $(error.field).focus();
  }
  $("error").textContent =
    error instanceof ApiError ? text(error.code, error.values) : text("failed", { message: error.message });
  show("error", true);
}

// Comparison

const psnrText = (value) => (value === Infinity ? text("equal") : text("decibels", { value: number(value, 1) }));

function showEntry(entry) {
  const { settings, plain, merged } = entry;
  const [width, height] = settings.size.split("x").map(Number);
  const prompt = settings.prompt || text("noPrompt");
  const both = Boolean(plain && merged);
  show("empty", false);
  show("drawn", true);
  $("frame").style.setProperty("--shape", width / height);
  $("frame").classList.toggle("single", !both);
  for (const [name, image] of Object.entries({ plain, merged })) {
    show(name, Boolean(image));
    show(`download-${name}`, Boolean(image));
    $(`${name}-seconds`).textContent = image ? text("seconds", { seconds: number(image.seconds, 2) }) : "–";
    if (!image) continue;
    $(name).src = $(`download-${name}`).href = image.url;
    $(`download-${name}`).download = `${name}_seed${settings.seed}.png`;
    $(name).alt = text(`${name}Alt`, { prompt, ratio: settings.tome_ratio });
  }
  const details = { prompt, seed: settings.seed, steps: settings.steps, guidance: settings.guidance_scale };
  $("caption").textContent = text("caption", { ...details, size: settings.size, ratio: settings.tome_ratio });
  $("speed-up").textContent = both ? `${number(entry.speedUp, 2)}×` : "–";
  $("psnr").textContent = both ? psnrText(entry.psnr) : "–";
  $("ssim").textContent = both ? number(entry.ssim, 3) : "–";
  const batch = Math.max(plain?.batch ?? 1, merged?.batch ?? 1);
  show("shared", batch > 1);
  $("shared").textContent = batch > 1 ? text("shared", { count: batch }) : "";
  show("difference-figure", both);
  if (both) {
    const { largest, mean, white } = drawDifference($("difference"), ...entry.pixels);
    const values = { largest, mean: number(mean, 1) };
    $("white").textContent = white;
    $("difference-text").textContent = text("differenceText", values);
    $("difference").ariaLabel = text("differenceLabel", values);
  }
  setDownload("download-settings", JSON.stringify(resultOf(entry), null, 2), `settings_seed${settings.seed}.json`);
  $("link").href = linkOf(settings);
  moveDivider(50);
}

/** What the JSON file has: the settings and what was measured. */
function resultOf({ settings, method, plain, merged, speedUp, psnr: db, ssim: similarity }) {
  const time = (image) => (image ? { seconds: image.seconds, images_in_the_call: image.batch } : null);
  const measures = { speed_up: speedUp ?? null, psnr: Number.isFinite(db) ? db : null, ssim: similarity ?? null };
  return { model: model.id, ...settings, tome_method: method, plain: time(plain), merged: time(merged), ...measures };
}

function setDownload(id, content, name) {
  URL.revokeObjectURL($(id).href);
  $(id).href = URL.createObjectURL(new Blob([content], { type: "application/json" }));
  $(id).download = name;
}

function moveDivider(percent) {
  $("split").value = percent;
  $("split").ariaValueText = text("splitValue", { percent: Math.round(percent) });
  $("frame").style.setProperty("--split", `${percent}%`);
}

// History

function addEntry(entry) {
  const { settings } = entry;
  entries.push(entry);
  const image = document.createElement("img");
  image.src = (entry.merged ?? entry.plain).url;
  image.alt = "";
  const button = document.createElement("button");
  button.type = "button";
  const prompt = settings.prompt || text("noPrompt");
  button.ariaLabel = text("thumbnail", { prompt, seed: settings.seed, ratio: settings.tome_ratio });
  button.title = button.ariaLabel;
  const caption = document.createElement("span");
  caption.textContent = prompt;
  button.append(image, caption);
  button.addEventListener("click", () => {
    clearErrors();
    fillForm(settings);
    showEntry(entry);
    history.replaceState(null, "", linkOf(settings));
  });
  const item = document.createElement("li");
  item.append(button);
  $("thumbnails").prepend(item);
  show("history", true);
  if (entries.length > MOST_ENTRIES) {
    const oldest = entries.shift();
    for (const one of [oldest.plain, oldest.merged]) if (one) URL.revokeObjectURL(one.url);
    $("thumbnails").lastElementChild.remove();
  }
}

// The key and the start

/** Ask for the key until the server accepts it. Resolves to whether it did. */
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
      if (!accepted) $("error").textContent = text("noKey");
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

function fillChoices() {
  $("model").textContent = text("model", { name: model.id });
  const ratios = model.tome_ratios.filter((ratio) => ratio > 0);
  const sizes = model.sizes.map((size) => [size, size.replace("x", " × ")]);
  $("size").replaceChildren(...sizes.map(([value, label]) => new Option(label, value)));
  $("tome_ratio").replaceChildren(...(ratios.length ? ratios : [0]).map((ratio) => new Option(ratio, ratio)));
  const missing = !model.tome_ratios.includes(0) ? "noPlain" : ratios.length ? null : "noMerged";
  show("exported", Boolean(missing));
  $("exported").textContent = missing ? text(missing) : "";
}

async function untilReady() {
  for (;;) {
    const state = await serverState();
    if (state === "ready") return;
    $("phase").textContent = text(state === "loading" ? "loading" : state === null ? "unreachable" : "ended");
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}

async function start() {
  translate();
  moveDivider(50);
  $("settings").addEventListener("submit", onDraw);
  $("cancel").addEventListener("click", () => controller?.abort());
  $("new-seed").addEventListener("click", () => ($("seed").value = randomSeed()));
  $("tome_ratio").addEventListener("change", showMethod);
  $("split").addEventListener("input", () => moveDivider(Number($("split").value)));
  $("copy").addEventListener("click", async () => {
    const copied = await navigator.clipboard?.writeText($("link").href).then(() => true, () => false);
    $("phase").textContent = text(copied ? "copied" : "notCopied");
  });
  try {
    await untilReady();
    if (!(await loadModelWithKey())) return;
    fillChoices();
    fillForm({ seed: randomSeed(), steps: model.steps, guidance_scale: model.guidance_scale });
    readLink();
    window.addEventListener("hashchange", readLink);
    $("draw").disabled = false;
    $("phase").textContent = text("ready");
  } catch (error) {
    await showError(error);
  }
}

start();
