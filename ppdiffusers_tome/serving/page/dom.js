// Find elements by id, and make small elements that several parts of the page need.

import { text } from "./texts.js";

const FOLDED = 160; // characters: a longer prompt is folded after these

export const $ = (id) => document.getElementById(id);
export const show = (id, visible) => ($(id).hidden = !visible);

/** A new element with these properties and contents. */
export function make(tag, properties = {}, ...contents) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...contents);
  return element;
}

/** A prompt, in the direction of its own script; a long one is folded. */
export function promptElement(prompt) {
  const characters = [...(prompt || text("noPrompt"))];
  if (characters.length <= FOLDED) return make("bdi", { textContent: characters.join("") });
  const start = text("showAll", { start: characters.slice(0, FOLDED).join("") });
  const summary = make("summary", {}, make("bdi", { textContent: start }));
  return make("details", { className: "folded" }, summary, make("bdi", { textContent: prompt }));
}

/** Set the text of a status; screen readers read it aloud when it changes. */
export function setStatus(status) {
  if ($("phase").textContent !== status) $("phase").textContent = status;
}
