// The images of one entry: any two of them at the divider, what is between them, and all ratios in a row and a plot.

import { $, make, promptElement, show } from "./dom.js";
import { compareTimes, differenceOf, mapOf, psnr, rms, roundedSimilarity, spreadOf, ssim, whiteOf } from "./measures.js";
import { linkOf } from "./settings.js";
import { placeLabels, ticksOf } from "./plot.js";
import { number, seconds, text } from "./texts.js";
import { fitImages } from "./zoom.js";

const urls = new Map(); // addresses of the images that have been shown
const pixels = new Map(); // promises of the pixels of these images
const SVG = "http://www.w3.org/2000/svg";

/** The address of an image's file in this tab. */
export function urlOf(image) {
  if (!urls.has(image.blob)) urls.set(image.blob, URL.createObjectURL(image.blob));
  return urls.get(image.blob);
}

/** Free the addresses and pixels of the images of an entry. */
export function forget(entry) {
  for (const { blob } of Object.values(entry.images)) {
    URL.revokeObjectURL(urls.get(blob));
    urls.delete(blob);
    pixels.delete(blob);
  }
}

function pixelsOf({ blob }) {
  if (!pixels.has(blob)) pixels.set(blob, readPixels(blob));
  return pixels.get(blob);
}

async function readPixels(blob) {
  const bitmap = await createImageBitmap(blob, { colorSpaceConversion: "none" });
  const canvas = new OffscreenCanvas(bitmap.width, bitmap.height);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(bitmap, 0, 0);
  return context.getImageData(0, 0, bitmap.width, bitmap.height);
}

/** The ratios of an entry's images, ascending. */
export function ratiosOf(entry) {
  return Object.keys(entry.images).map(Number).sort((a, b) => a - b);
}

export function nameOfRatio(ratio) {
  return ratio === 0 ? text("plain") : text("ratioShort", { ratio });
}

/** The two ratios at the divider, the lower one on the left; the same one twice if there is one image. */
export function shownPair(entry) {
  const ratios = ratiosOf(entry);
  const shown = entry.shown.filter((ratio) => ratios.includes(ratio));
  for (const ratio of [ratios[0], ...ratios.toReversed()]) if (shown.length < 2 && !shown.includes(ratio)) shown.push(ratio);
  return [Math.min(...shown), Math.max(...shown)];
}

const spreadOfRatio = (entry, ratio) => spreadOf(entry.images[ratio].steps);

async function measuresOf(entry) {
  const ratios = ratiosOf(entry);
  const images = Object.fromEntries(await Promise.all(ratios.map(async (r) => [r, await pixelsOf(entry.images[r])])));
  const toPlain = {};
  for (const ratio of images[0] ? ratios.slice(1) : []) {
    const pair = [images[0], images[ratio]];
    toPlain[ratio] = { psnr: psnr(...pair), rms: rms(...pair), ...differenceOf(...pair) };
  }
  const [a, b] = shownPair(entry);
  const pair = a === b ? null : [images[a], images[b]];
  const between = pair && { psnr: psnr(...pair), ssim: ssim(...pair), ...differenceOf(...pair) };
  const white = whiteOf(Math.max(0, between?.largest ?? 0, ...Object.values(toPlain).map((measures) => measures.largest)));
  return { ratios, images, toPlain, between, white };
}

export const psnrText = (value) => (value === Infinity ? text("equal") : text("decibels", { value: number(value, 1) }));

/** PSNR between two images of an entry. */
export async function psnrOf(entry, [a, b]) {
  return psnr(await pixelsOf(entry.images[a]), await pixelsOf(entry.images[b]));
}

let latest = 0; // number of the latest call of showEntry; results of earlier calls are dropped

/**
 * Show an entry.
 * @param model as in GET /v1/models
 * @param onPick called with a ratio whose image was clicked
 */
export async function showEntry(entry, model, onPick) {
  const call = ++latest;
  const measures = await measuresOf(entry);
  if (call !== latest) return;
  const pair = shownPair(entry);
  const focused = document.activeElement?.dataset?.ratio;
  show("empty", false);
  show("generated", true);
  showImages(entry, pair);
  showMeasures(entry, pair, measures);
  showDifference(measures);
  showCards(entry, pair, measures, model, onPick);
  showPlot(entry, measures);
  showDownloads(entry, pair, measures, model);
  if (focused !== undefined) $("ratios").querySelector(`[data-ratio="${focused}"]`)?.focus({ preventScroll: true });
}

/** Show no entry. */
export function showNothing() {
  latest++;
  show("empty", true);
  show("generated", false);
}

function showImages(entry, pair) {
  const { settings } = entry;
  const [width, height] = settings.size.split("x").map(Number);
  const isSingle = pair[0] === pair[1];
  $("frame").classList.toggle("single", isSingle);
  show("split", !isSingle);
  for (const [side, ratio] of [["left", pair[0]], ["right", pair[1]]]) {
    const name = nameOfRatio(ratio);
    const url = urlOf(entry.images[ratio]);
    if ($(side).src !== url) $(side).src = url;
    $(side).alt = text("imageOf", { name, prompt: settings.prompt || text("noPrompt") });
    $(`${side}-name`).textContent = name;
  }
  fitImages(width, height, nameOfRatio(pair[0]));
  const { seed, steps, guidance_scale: guidance, size, negative_prompt: negative, strength } = settings;
  const details = [text("caption", { seed, steps, guidance, size: size.replace("x", "\u00a0×\u00a0") })];
  if (strength) details.push(text("captionStrength", { strength }));
  $("caption").replaceChildren(promptElement(settings.prompt), make("span", { textContent: details.join(" · ") }));
  if (negative) {
    const [before, after] = text("captionNegative", { prompt: "\n" }).split("\n");
    $("caption").append(make("span", {}, before, promptElement(negative), after));
  }
}

function showMeasures(entry, pair, { between }) {
  const spreads = pair.map((ratio) => spreadOfRatio(entry, ratio));
  for (const [index, side] of ["left", "right"].entries()) {
    const spread = spreads[index];
    $(`${side}-time-name`).textContent = text("timeOf", { name: nameOfRatio(pair[index]) });
    $(`${side}-time`).textContent = spread ? seconds(spread.median) : "–";
    const values = spread && { low: seconds(spread.low), high: seconds(spread.high), count: spread.count };
    $(`${side}-spread`).textContent = !spread ? "" : text(spread.count > 2 ? "perStep" : "perStepFew", values);
    show(`${side}-time-name`, index === 0 || between !== null);
    $(`${side}-time`).parentElement.hidden = index === 1 && between === null;
  }
  const { kind, factor } = compareTimes(...spreads);
  const words = {
    unknown: [text("unknown"), text("unknownHint")],
    same: [text("same"), text("sameHint")],
    differs: [text("asFast", { factor: number(factor, 2) }), text("fasterHint", { left: nameOfRatio(pair[0]), right: nameOfRatio(pair[1]) })],
  };
  $("speed").dataset.kind = kind;
  [$("speed").textContent, $("speed-note").textContent] = words[kind];
  $("psnr").textContent = between ? psnrText(between.psnr) : "–";
  $("ssim").textContent = between ? roundedSimilarity(between.ssim, (value) => number(value, 3)) : "–";
  for (const id of ["speed", "psnr", "ssim"]) $(id).parentElement.hidden = between === null;
  const batch = Math.max(...pair.map((ratio) => entry.images[ratio].batch));
  show("shared", batch > 1);
  $("shared").textContent = batch > 1 ? text("shared", { count: batch }) : "";
}

function drawMap(canvas, { levels }, white, { width, height }) {
  canvas.width = width;
  canvas.height = height;
  canvas.getContext("2d").putImageData(new ImageData(mapOf(levels, white), width, height), 0, 0);
}

function showDifference({ between, white, images }) {
  show("difference-figure", between !== null);
  for (const element of document.querySelectorAll(".scale .white")) element.textContent = white;
  for (const element of document.querySelectorAll(".scale .middle")) element.textContent = Math.round(white / 4);
  if (!between) return;
  drawMap($("difference"), between, white, Object.values(images)[0]);
  const values = { largest: between.largest, mean: number(between.mean, 1) };
  $("difference-text").textContent = text("differenceText", values);
  $("difference").ariaLabel = text("differenceLabel", values);
}

function showCards(entry, pair, { ratios, toPlain, white, images }, model, onPick) {
  const exported = [...new Set([...model.tome_ratios, ...ratios])].sort((a, b) => a - b);
  const cards = exported.map((ratio) => {
    const name = nameOfRatio(ratio);
    const image = entry.images[ratio];
    if (!image) {
      const hint = make("span", { className: "hint", textContent: text("missing") });
      return make("li", { className: "missing" }, make("strong", { textContent: name }), hint);
    }
    const side = pair[0] === pair[1] ? "" : ratio === pair[0] ? "left" : ratio === pair[1] ? "right" : "";
    const pictures = make("span", { className: "pictures" }, make("img", { src: urlOf(image), alt: "" }));
    if (toPlain[ratio]) {
      const canvas = make("canvas", { ariaHidden: "true" });
      drawMap(canvas, toPlain[ratio], white, images[ratio]);
      pictures.append(canvas);
    }
    const label = make("span", { className: "card-name" }, make("strong", { textContent: name }));
    if (side) label.append(make("span", { className: "side", textContent: text(side) }));
    const button = make("button", { type: "button", ariaPressed: String(side !== "") }, pictures, label);
    button.ariaLabel = text("cardLabel", { name }) + (side ? ` (${text(side)})` : "");
    button.dataset.ratio = ratio;
    button.addEventListener("click", () => onPick(ratio));
    const spread = spreadOf(image.steps);
    const facts = [
      [text("cardTime"), spread ? seconds(spread.median) : "–"],
      ["PSNR", toPlain[ratio] ? psnrText(toPlain[ratio].psnr) : "–"],
    ];
    const list = facts.map(([term, fact]) =>
      make("div", {}, make("dt", { textContent: term }), make("dd", { textContent: fact })),
    );
    return make("li", {}, button, make("dl", {}, ...list));
  });
  $("ratios").replaceChildren(...cards);
}

function svg(tag, attributes, content = "") {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = content;
  return element;
}

/** The text of a tick, with as many digits as the step between ticks needs. */
function tickText(ticks, tick) {
  return number(tick, Math.max(0, -Math.floor(Math.log10(ticks[1] - ticks[0]) + 1e-9)));
}

/** Plot the distance from plain over seconds per step: a point for each ratio, with the quartiles of its times. */
function showPlot(entry, { ratios, toPlain }) {
  const points = ratios
    .map((ratio) => ({ ratio, distance: ratio === 0 ? 0 : toPlain[ratio]?.rms, spread: spreadOfRatio(entry, ratio) }))
    .filter(({ distance, spread }) => distance !== undefined && spread);
  show("plot-figure", points.length > 1);
  if (points.length < 2) return;
  const [left, right, top, bottom] = [40, 308, 12, 168];
  const times = ticksOf(Math.min(...points.map(({ spread }) => spread.low)), Math.max(...points.map(({ spread }) => spread.high)));
  const distances = ticksOf(0, Math.max(...points.map(({ distance }) => distance)) || 1);
  const x = (time) => left + ((right - left) * (time - times[0])) / (times.at(-1) - times[0]);
  const y = (distance) => bottom - ((bottom - top) * distance) / distances.at(-1);
  const parts = [];
  for (const distance of distances) {
    parts.push(svg("line", { class: "grid", x1: left, x2: right, y1: y(distance), y2: y(distance) }));
    parts.push(svg("text", { class: "tick", x: left - 6, y: y(distance) + 3.5, "text-anchor": "end" }, tickText(distances, distance)));
  }
  for (const time of times) {
    parts.push(svg("text", { class: "tick", x: x(time), y: bottom + 14, "text-anchor": "middle" }, tickText(times, time)));
  }
  parts.push(svg("text", { class: "axis", x: (left + right) / 2, y: 203, "text-anchor": "middle" }, text("plotX")));
  const axis = { class: "axis", x: 11, y: (top + bottom) / 2, "text-anchor": "middle" };
  parts.push(svg("text", { ...axis, transform: `rotate(-90 11 ${(top + bottom) / 2})` }, text("plotYShort")));
  const line = points.map(({ spread, distance }) => `${x(spread.median)},${y(distance)}`).join(" ");
  parts.push(svg("polyline", { class: "curve", points: line }));
  const names = points.map(({ ratio, distance, spread }) => {
    const name = ratio === 0 ? text("plain") : String(ratio);
    return { x: x(spread.median), y: y(distance), name };
  });
  const places = placeLabels(names, { left, right, top, bottom });
  for (const [index, { distance, spread }] of points.entries()) {
    const at = { cx: x(spread.median), cy: y(distance) };
    parts.push(svg("line", { class: "spread", x1: x(spread.low), x2: x(spread.high), y1: at.cy, y2: at.cy }));
    parts.push(svg("circle", { class: "point", ...at, r: 4 }));
    parts.push(svg("text", { class: "name", ...places[index] }, names[index].name));
  }
  $("plot").replaceChildren(...parts);
  const described = points.map(({ ratio, distance, spread }) =>
    text("plotPoint", { ratio, seconds: seconds(spread.median), distance: number(distance, 2) }),
  );
  $("plot").ariaLabel = text("plotLabel", { points: described.join("; ") });
}

function showDownloads(entry, pair, measures, model) {
  const { settings } = entry;
  for (const [index, side] of ["left", "right"].entries()) {
    const ratio = pair[index];
    const link = $(`download-${side}`);
    link.parentElement.hidden = index === 1 && pair[0] === pair[1];
    link.href = urlOf(entry.images[ratio]);
    link.download = `${ratio === 0 ? "plain" : `ratio${ratio}`}_seed${settings.seed}.png`;
    link.textContent = text("downloadSide", { name: nameOfRatio(ratio) });
  }
  const link = $("download-settings");
  URL.revokeObjectURL(link.href);
  const file = new Blob([JSON.stringify(resultOf(entry, pair, measures, model), null, 2)], { type: "application/json" });
  link.href = URL.createObjectURL(file);
  link.download = `settings_seed${settings.seed}.json`;
  $("link").href = linkOf({ ...settings, tome_ratio: pair[1] });
  $("copied").textContent = "";
}

/** The content of the JSON file: settings, measures of each image, and distances between the two images on show. */
function resultOf(entry, pair, { ratios, toPlain, between }, model) {
  const finite = (value) => (Number.isFinite(value) ? value : null); // JSON has no infinity
  const images = ratios.map((ratio) => {
    const { seconds: time, batch, steps, runs, method } = entry.images[ratio];
    const distance = toPlain[ratio] ? { psnr_to_plain: finite(toPlain[ratio].psnr), rms_to_plain: toPlain[ratio].rms } : {};
    const spread = spreadOf(steps);
    const times = { seconds: time, images_in_the_call: batch, runs, seconds_per_step: spread, step_seconds: steps };
    return { tome_ratio: ratio, tome_method: method, ...distance, ...times };
  });
  const { kind, factor } = compareTimes(...pair.map((ratio) => spreadOfRatio(entry, ratio)));
  const speed = { comparison: kind, times_as_fast: finite(factor) };
  const shown = between && { ratios: pair, psnr: finite(between.psnr), ssim: between.ssim, speed };
  return { model: model.id, ...entry.settings, tome_ratio: pair[1], images, shown };
}
