// The divider between two images; pan and zoom of both images and the maps, which share one view.

import { $ } from "./dom.js";
import { text } from "./texts.js";

const STEP = 1.5; // factor of one press
const MAX_SCALE = 64; // relative to the size that fits the pane
const PAN = 0.1; // share of the pane that one arrow key moves

/** What is visible: the images are `scale` times as large as a pane, and begin at x and y, in shares of the pane. */
export const FIT = { scale: 1, x: 0, y: 0 };

/** The view moved so that there is no gap beside the image; a small image is centred. */
export function clampView({ scale, x, y }) {
  const place = (value) => (scale < 1 ? (1 - scale) / 2 : Math.min(0, Math.max(1 - scale, value)));
  return { scale, x: place(x), y: place(y) };
}

/** The view at another scale that shows the same at the point (x, y) of the pane. */
export function scaleAt(view, scale, x = 0.5, y = 0.5) {
  const factor = scale / view.scale;
  return clampView({ scale, x: x - (x - view.x) * factor, y: y - (y - view.y) * factor });
}

let view = FIT;
let size = { width: 1, height: 1 }; // the image's, in pixels
let leftName = "";

const frame = () => $("frame");
const frames = () => document.querySelectorAll("#panes .frame");

/** Pixels of the screen per pixel of the image, where it fits. */
function fitScale() {
  return (frame().clientWidth * devicePixelRatio) / size.width || 1;
}

function setView(next) {
  view = next;
  const style = $("panes").style;
  style.setProperty("--scale", view.scale);
  style.setProperty("--x", `${100 * view.x}%`);
  style.setProperty("--y", `${100 * view.y}%`);
  $("panes").classList.toggle("zoomed", view.scale > 1);
  $("zoom-level").value = text("zoomLevel", { percent: Math.round(100 * view.scale * fitScale()) });
}

function zoomBy(factor, x, y) {
  const smallest = Math.min(1, 1 / fitScale());
  setView(scaleAt(view, Math.min(MAX_SCALE, Math.max(smallest, view.scale * factor)), x, y));
}

function pan(x, y) {
  setView(clampView({ ...view, x: view.x + x, y: view.y + y }));
}

/** Put the divider at a percentage of the pane. */
export function moveDivider(percent) {
  $("split").value = percent;
  $("split").ariaValueText = text("splitValue", { percent: Math.round($("split").value), left: leftName });
  frame().style.setProperty("--split", `${$("split").value}%`);
}

/** Fit the view to images of a size. The same images keep their view. */
export function fitImages(width, height, left) {
  $("panes").style.setProperty("--shape", width / height);
  const isNew = width !== size.width || height !== size.height;
  size = { width, height };
  leftName = left;
  setView(isNew ? FIT : view);
  moveDivider($("split").value);
}

function onPointerDown(event) {
  if (event.button !== 0) return; // the right one opens the menu of the image
  const pane = event.currentTarget;
  const moves = pane === frame() && !pane.classList.contains("single") && (view.scale <= 1 || event.target === $("handle"));
  if (!moves && view.scale <= 1) return;
  const box = pane.getBoundingClientRect();
  let last = event;
  const onMove = (next) => {
    if (moves) moveDivider((100 * (next.clientX - box.left)) / box.width);
    else pan((next.clientX - last.clientX) / box.width, (next.clientY - last.clientY) / box.height);
    last = next;
  };
  pane.setPointerCapture(event.pointerId);
  pane.addEventListener("pointermove", onMove);
  const end = () => pane.removeEventListener("pointermove", onMove);
  pane.addEventListener("pointerup", end, { once: true });
  pane.addEventListener("pointercancel", end, { once: true });
  if (moves) onMove(event);
}

function onWheel(event) {
  if (!event.ctrlKey && !document.fullscreenElement) return; // the page scrolls
  event.preventDefault();
  const box = event.currentTarget.getBoundingClientRect();
  zoomBy(2 ** (-event.deltaY / 300), (event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height);
}

const ACTIONS = {
  "+": () => zoomBy(STEP),
  "=": () => zoomBy(STEP),
  "-": () => zoomBy(1 / STEP),
  0: () => setView(FIT),
  1: () => setView(scaleAt(view, 1 / fitScale())),
};
const ARROWS = { ArrowLeft: [PAN, 0], ArrowRight: [-PAN, 0], ArrowUp: [0, PAN], ArrowDown: [0, -PAN] };

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const isInside = $("viewer").contains(event.target);
  const isFree = event.target === document.body || (isInside && event.target.type !== "range");
  const side = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  let action = null;
  if (event.shiftKey && ARROWS[event.key]) action = isInside && (() => pan(...ARROWS[event.key]));
  else if (side) action = isFree && !$("split").hidden && (() => moveDivider(+$("split").value + side));
  else action = isInside && ACTIONS[event.key];
  if (!action) return;
  event.preventDefault();
  action();
}

function toggleFullScreen() {
  if (document.fullscreenElement) document.exitFullscreen();
  else $("viewer").requestFullscreen();
}

/** Connect the viewer's buttons, keys and pointers. */
export function startViewer() {
  setView(FIT);
  moveDivider(50);
  $("split").addEventListener("input", () => moveDivider($("split").value));
  $("zoom-in").addEventListener("click", ACTIONS["+"]);
  $("zoom-out").addEventListener("click", ACTIONS["-"]);
  $("zoom-fit").addEventListener("click", ACTIONS[0]);
  $("zoom-actual").addEventListener("click", ACTIONS[1]);
  $("pixelated").addEventListener("click", () => {
    $("pixelated").ariaPressed = String($("panes").classList.toggle("pixelated"));
  });
  $("full-screen").hidden = !document.fullscreenEnabled;
  $("full-screen").addEventListener("click", toggleFullScreen);
  document.addEventListener("fullscreenchange", () => {
    $("full-screen").textContent = text(document.fullscreenElement ? "exitFullScreen" : "fullScreen");
  });
  document.addEventListener("keydown", onKey);
  for (const pane of frames()) {
    pane.addEventListener("pointerdown", onPointerDown);
    pane.addEventListener("click", () => $("split").focus({ preventScroll: true })); // for the keys
    pane.addEventListener("wheel", onWheel, { passive: false });
    pane.addEventListener("dblclick", (event) => {
      const box = pane.getBoundingClientRect();
      if (pane !== frame()) zoomBy(2, (event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height);
    });
  }
  new ResizeObserver(() => setView(view)).observe(frame());
}
