// The settings of an image: check them, make a link of them, read them from files. This module needs no document.

export const FIELDS = ["prompt", "negative_prompt", "seed", "steps", "guidance_scale", "size", "tome_ratio", "strength"];
const INTEGERS = ["seed", "steps"];
const NUMBERS = ["seed", "steps", "guidance_scale"];

/**
 * The exported ratio or size that a text means; undefined if there is none. ".5" is 0.5, and "128" is 128x128.
 * Ratios that are the same in six digits are the same ratio, as for the server: "0.333333" is 1/3.
 */
export function choiceOf(name, text, model) {
  const value = String(text).trim();
  if (name === "tome_ratio") {
    const digits = Number(value).toPrecision(6);
    return value === "" ? undefined : model.tome_ratios.find((ratio) => ratio.toPrecision(6) === digits);
  }
  const size = value.toLowerCase().replaceAll(/\s*[x×]\s*/g, "x");
  return model.sizes.find((exported) => exported === (size.includes("x") ? size : `${size}x${size}`));
}

/**
 * Check what was typed.
 * @param values texts by field; `strength` only with an image
 * @returns {{settings: object|null, errors: [string, string, object][]}} field, text and its values of each error
 */
export function check(values, model) {
  const settings = {};
  const errors = [];
  for (const name of ["prompt", "negative_prompt"]) {
    settings[name] = values[name] ?? "";
    const count = [...settings[name]].length;
    if (count > model.prompt_characters) errors.push([name, "longPrompt", { count, limit: model.prompt_characters }]);
  }
  for (const name of NUMBERS) {
    const typed = String(values[name]).trim();
    const value = typed === "" ? NaN : Number(typed);
    const [low, high] = model.ranges[name];
    const isWhole = INTEGERS.includes(name);
    settings[name] = value;
    if (!(value >= low && value <= high) || (isWhole && !Number.isInteger(value))) {
      errors.push([name, isWhole ? "wholeNumber" : "number", { name, low, high }]);
    }
  }
  for (const name of ["size", "tome_ratio"]) {
    settings[name] = choiceOf(name, values[name], model);
    if (settings[name] === undefined) errors.push([name, "notExported", { value: values[name] }]);
  }
  if (values.strength !== undefined) {
    settings.strength = Number(values.strength);
    if (!(settings.strength > 0 && settings.strength <= 1)) {
      errors.push(["strength", "number", { name: "strength", low: 0.01, high: 1 }]);
    } else if (Math.trunc(settings.steps * settings.strength) < 1) {
      errors.push(["strength", "noStep", {}]);
    }
  }
  return { settings: errors.length ? null : settings, errors };
}

/** The link to settings: a fragment, which browsers do not send. */
export function linkOf(settings) {
  const given = FIELDS.filter((name) => ![undefined, null, ""].includes(settings[name]) || name === "prompt");
  return "#" + new URLSearchParams(given.map((name) => [name, settings[name]]));
}

/** The settings of a link, as texts. */
export function readLink(fragment) {
  const values = Object.fromEntries(new URLSearchParams(fragment.replace(/^#/, "")));
  return pick(values);
}

function pick(values) {
  const given = FIELDS.filter((name) => values[name] !== undefined && values[name] !== null);
  return Object.fromEntries(given.map((name) => [name, values[name]]));
}

/** Settings without the ratio, as a text: images of one key differ in their ratio only. */
export function keyOf({ tome_ratio, ...settings }, server, source) {
  return JSON.stringify([server, source ?? null, ...FIELDS.map((name) => settings[name] ?? null)]);
}

/** A short name for a text, such as an image in base64 (FNV-1a, 32 bits, and its length). */
export function nameOf(text) {
  let hash = 0x811c9dc5;
  for (let i = 0; i < text.length; i++) hash = Math.imul(hash ^ text.charCodeAt(i), 0x01000193);
  return `${(hash >>> 0).toString(16)}-${text.length}`;
}

/** The settings in a PNG of this server or a JSON file of this page; null if the file has none. */
export function readFile(bytes) {
  const text = isPng(bytes) ? pngText(bytes, "ppdiffusers_tome") : new TextDecoder().decode(bytes);
  if (text === null) return null;
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    return null;
  }
  if (data === null || typeof data !== "object" || typeof data.prompt !== "string") return null;
  const size = data.width && data.height ? { size: `${data.width}x${data.height}` } : {};
  return pick({ ...data, ...size });
}

function isPng(bytes) {
  return [0x89, 0x50, 0x4e, 0x47].every((byte, index) => bytes[index] === byte);
}

/** The text of a PNG's tEXt chunk; null if there is none. */
function pngText(bytes, keyword) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const latin = new TextDecoder("latin1");
  for (let at = 8; at + 12 <= bytes.length; ) {
    const length = view.getUint32(at);
    const data = bytes.subarray(at + 8, at + 8 + length);
    const end = data.indexOf(0);
    if (latin.decode(bytes.subarray(at + 4, at + 8)) === "tEXt" && latin.decode(data.subarray(0, end)) === keyword) {
      return latin.decode(data.subarray(end + 1));
    }
    at += 12 + length;
  }
  return null;
}
