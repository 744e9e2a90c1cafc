// The form: its fields, their errors, the token counter, the start image, and files that restore settings.

import { countTokens } from "./api.js";
import { $, make, setStatus, show } from "./dom.js";
import { FIELDS, check, choiceOf, linkOf, nameOf, readFile, readLink } from "./settings.js";
import { text } from "./texts.js";

const COUNT_DELAY = 300; // ms after the last key
// The terms that explain a method, each with the methods that it is part of, in the server's words.
const EXPLAINED = {
  interlace: /^interlace\b/,
};

let model = null;
let source = null; // the start image: {blob, name}, cut to the size in the form
let original = null; // the start image before it was cut: {bitmap}; null if it comes from the history
let choices = 0; // how many start images were chosen: a file that is read slowly must not replace a later choice
let counting = null; // AbortController of the latest count of tokens

export function randomSeed() {
  return crypto.getRandomValues(new Uint32Array(1))[0];
}

/** The start image, or null. */
export function sourceImage() {
  return source;
}

// Fields

function typed() {
  const values = Object.fromEntries(FIELDS.map((name) => [name, $(name).value]));
  if (!source) delete values.strength;
  return values;
}

/** Put values into the form. Without an entry's `image`, the start image stays. */
export function fillForm(values, image = source) {
  for (const name of FIELDS) {
    const value = values[name];
    if (value === undefined || value === null) continue;
    if (!($(name) instanceof HTMLSelectElement)) {
      $(name).value = value;
      continue;
    }
    const choice = choiceOf(name, value, model);
    if (choice === undefined) showFieldError(name, text("notExported", { value }));
    else $(name).value = choice;
  }
  if (image !== source) setSource(image, null);
  if (values.negative_prompt || source) $("more").open = true;
  showMethod();
  countSoon();
}

/** The settings in the form; null, with a message at each wrong field, if one is not allowed. */
export function readForm() {
  clearErrors();
  if ($("seed").value.trim() === "") $("seed").value = randomSeed();
  const { settings, errors } = check(typed(), model);
  for (const [name, message, values] of errors) showFieldError(name, messageOf(message, values));
  if (errors.length) focusField(errors[0][0]);
  return settings;
}

/** The settings in the form without any message; null if one is not allowed. */
export function settingsOrNull() {
  return check(typed(), model).settings;
}

const messageOf = (name, values) => text(name, values.name ? { ...values, name: text(values.name) } : values);

export function showFieldError(name, message) {
  $(`${name}-error`).textContent = message;
  $(name).setAttribute("aria-invalid", "true");
}

/** Show the server's error at its field; returns whether the form has that field. */
export function showServerError(name, message) {
  if (name === "image") $("image-error").textContent = message;
  else if (FIELDS.includes(name)) showFieldError(name, message);
  else return false;
  focusField(name);
  return true;
}

function focusField(name) {
  if (["negative_prompt", "strength", "image"].includes(name)) $("more").open = true;
  $(name === "image" ? "image-choose" : name).focus();
}

function clearError(name) {
  $(`${name}-error`).textContent = "";
  $(name).removeAttribute("aria-invalid");
}

export function clearErrors() {
  show("error", false);
  FIELDS.forEach(clearError);
  $("image-error").textContent = "";
}

/** When a field with an error changes, its error vanishes as soon as the value is allowed. */
function checkAgain() {
  const wrong = FIELDS.filter((name) => $(name).hasAttribute("aria-invalid"));
  if (!wrong.length) return;
  const errors = check(typed(), model).errors.map(([name]) => name);
  for (const name of wrong) if (!errors.includes(name)) clearError(name);
}

/** Put the settings of the form into the page's address, so that a reload restores them. */
export function writeLink() {
  const values = typed();
  history.replaceState(null, "", linkOf(values));
}

/** Fill in the settings of the page's address; returns whether it has any. */
export function restoreLink() {
  const values = readLink(location.hash);
  clearErrors();
  fillForm(values);
  return Object.keys(values).length > 0;
}

// Explanations

function showMethod() {
  const ratio = Number($("tome_ratio").value);
  const method = model.tome_methods[model.tome_ratios.indexOf(ratio)] ?? "";
  $("method-words").textContent = ratio > 0 ? text("usedMethod", { method }) : "";
  const terms = Object.keys(EXPLAINED).filter((term) => ratio > 0 && EXPLAINED[term].test(method));
  const lines = terms.map((term) => make("li", {}, termButton(term), ` ${text(`line_${term}`)}`));
  $("method-terms").replaceChildren(...lines);
}

/** A button with a term, which opens the glossary. */
function termButton(term) {
  const button = make("button", { type: "button", className: "term" });
  button.dataset.term = term;
  button.textContent = text(`term_${term}`);
  return button;
}

// Tokens

function countSoon() {
  counting?.abort();
  counting = new AbortController();
  const { signal } = counting;
  setTimeout(() => !signal.aborted && showTokens(signal), COUNT_DELAY);
}

async function showTokens(signal) {
  const prompt = $("prompt").value;
  let counted = null;
  if ([...prompt].length <= model.prompt_characters) counted = await countTokens(prompt).catch(() => null);
  if (signal.aborted) return;
  $("tokens").textContent = counted ? text("tokens", counted) : "";
  $("tokens-cut").textContent = counted?.cut ? text("tokensCut", counted) : "";
}

// The start image

function setSource(image, from) {
  source = image;
  original = from;
  if (!from) choices += 1;
  show("image-preview", Boolean(image));
  show("image-remove", Boolean(image));
  show("strength-field", Boolean(image));
  URL.revokeObjectURL($("image-preview").src);
  if (image) $("image-preview").src = URL.createObjectURL(image.blob);
  $("image-preview").alt = image ? text("imageAlt") : "";
  $("image-error").textContent = "";
  if (image) $("more").open = true;
}

/** Cut the middle of an image to the size in the form; white where it is transparent, as a PNG. */
async function cut(bitmap) {
  const [width, height] = $("size").value.split("x").map(Number);
  const canvas = new OffscreenCanvas(width, height);
  const context = canvas.getContext("2d");
  const scale = Math.max(width / bitmap.width, height / bitmap.height);
  const [w, h] = [bitmap.width * scale, bitmap.height * scale];
  context.fillStyle = "white";
  context.fillRect(0, 0, width, height);
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, (width - w) / 2, (height - h) / 2, w, h);
  const blob = await canvas.convertToBlob({ type: "image/png" });
  return { blob, name: nameOf(await base64Of(blob)) };
}

/** The bytes of a file in base64. */
export async function base64Of(blob) {
  const bytes = new Uint8Array(await blob.arrayBuffer());
  let binary = "";
  for (let at = 0; at < bytes.length; at += 0x8000) binary += String.fromCharCode(...bytes.subarray(at, at + 0x8000));
  return btoa(binary);
}

/** Make an image the start image, unless another image or size is chosen before it is cut. */
async function place(from) {
  original = from;
  const size = $("size").value;
  const image = await cut(from.bitmap);
  if (original === from && $("size").value === size) setSource(image, from);
}

async function useImage(file) {
  const choice = ++choices;
  try {
    const bitmap = await createImageBitmap(file);
    if (choice === choices) await place({ bitmap });
  } catch {
    $("more").open = true;
    $("image-error").textContent = text("notReadable", { file: file.name });
  }
}

/** Read a file that was dropped or pasted: a file of this page restores its settings, others are start images. */
async function takeFile(file, isForImage) {
  const settings = isForImage ? null : readFile(new Uint8Array(await file.arrayBuffer()));
  if (settings) {
    clearErrors();
    const { strength, ...others } = settings;
    fillForm({ negative_prompt: "", ...others, ...(source && strength ? { strength } : {}) });
    writeLink();
    setStatus(text(strength ? "restoredImage" : "restored", { file: file.name }));
  } else if (model.image_to_image && file.type.startsWith("image/")) {
    await useImage(file);
  } else {
    setStatus(text(model.image_to_image ? "notReadable" : "notOurs", { file: file.name }));
  }
}

function startFiles() {
  const isFile = (event) => event.dataTransfer?.types.includes("Files");
  document.addEventListener("dragover", (event) => {
    if (!isFile(event)) return;
    event.preventDefault();
    document.body.classList.add("dragging");
  });
  document.addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) document.body.classList.remove("dragging");
  });
  document.addEventListener("drop", (event) => {
    if (!isFile(event)) return;
    event.preventDefault();
    document.body.classList.remove("dragging");
    const [file] = event.dataTransfer.files;
    if (file) takeFile(file, Boolean(event.target.closest?.("#image-zone")));
  });
  document.addEventListener("paste", (event) => {
    const [file] = event.clipboardData?.files ?? [];
    if (!file) return;
    event.preventDefault();
    takeFile(file, model.image_to_image);
  });
  $("image-choose").addEventListener("click", () => $("image-file").click());
  $("image-file").addEventListener("change", () => {
    const [file] = $("image-file").files;
    if (file) takeFile(file, true);
    $("image-file").value = "";
  });
  $("image-remove").addEventListener("click", () => {
    setSource(null, null);
    $("image-choose").focus({ preventScroll: true });
  });
  $("size").addEventListener("change", () => original && place(original));
}

// The start

function fillChoices() {
  $("model").textContent = text("model", { name: model.id });
  const ratios = model.tome_ratios.filter((ratio) => ratio > 0);
  const hasPlain = model.tome_ratios.includes(0);
  const sizes = model.sizes.map((size) => new Option(size.replace("x", " × "), size));
  const options = ratios.map((ratio) => new Option(ratio, ratio));
  if (hasPlain) options.push(new Option(text("plainOnly"), 0));
  $("size").replaceChildren(...sizes);
  $("tome_ratio").replaceChildren(...options);
  const missing = !hasPlain ? "noPlain" : ratios.length ? null : "noMerged";
  show("exported", Boolean(missing));
  $("exported").textContent = missing ? text(missing) : "";
  show("image-field", model.image_to_image);
  $("more-summary").textContent = text(model.image_to_image ? "moreImage" : "more");
  const chips = model.prompts.map((prompt) => {
    const chip = make("button", { type: "button" }, make("bdi", { textContent: prompt }));
    chip.addEventListener("click", () => {
      $("prompt").value = prompt;
      $("prompt").dispatchEvent(new Event("input", { bubbles: true }));
    });
    return chip;
  });
  $("examples").replaceChildren(...chips);
  show("examples", chips.length > 0);
}

/** Offer the sizes and ratios of the model, and put its defaults into the form. */
export function startForm(loaded) {
  model = loaded;
  fillChoices();
  fillForm({ prompt: model.prompts[0], seed: randomSeed(), steps: model.steps, guidance_scale: model.guidance_scale });
  startFiles();
  $("new-seed").addEventListener("click", () => {
    $("seed").value = randomSeed();
    $("seed").dispatchEvent(new Event("input", { bubbles: true }));
  });
  $("tome_ratio").addEventListener("change", showMethod);
  $("prompt").addEventListener("input", countSoon);
  $("settings").addEventListener("input", checkAgain);
  $("settings").addEventListener("change", writeLink);
  $("new-seed").addEventListener("click", writeLink);
  $("examples").addEventListener("click", writeLink);
}

/** Use the model of a server that was started again. */
export function renewModel(loaded) {
  model = loaded;
}
