import assert from "node:assert/strict";
import test from "node:test";
import { shownPair, ticksOf } from "./page/compare.js";
import { surplusOf } from "./page/history.js";
import { FIT, clampView, scaleAt } from "./page/zoom.js";

test("zooming leaves the point under the pointer where it is", () => {
  const view = scaleAt(scaleAt(FIT, 2, 0.25, 0.5), 4, 0.6, 0.5);
  const shown = (x) => (x - view.x) / view.scale; // what of the image is at x
  const before = scaleAt(FIT, 2, 0.25, 0.5);
  assert.ok(Math.abs(shown(0.6) - (0.6 - before.x) / before.scale) < 1e-12);
  assert.deepEqual(scaleAt(view, 1), FIT);
});

test("no gap beside a large image, and a small one in the middle", () => {
  assert.deepEqual(clampView({ scale: 2, x: 0.3, y: -5 }), { scale: 2, x: 0, y: -1 });
  assert.deepEqual(clampView({ scale: 0.5, x: 9, y: 9 }), { scale: 0.5, x: 0.25, y: 0.25 });
});

test("any two images are at the divider, the lower ratio on the left", () => {
  const entry = (shown, ...ratios) => ({ shown, images: Object.fromEntries(ratios.map((ratio) => [ratio, {}])) });
  assert.deepEqual(shownPair(entry([0.5, 0], 0)), [0, 0], "the plain image at first");
  assert.deepEqual(shownPair(entry([0.5, 0], 0, 0.5)), [0, 0.5]);
  assert.deepEqual(shownPair(entry([0.75, 0.25], 0, 0.25, 0.5, 0.75)), [0.25, 0.75]);
  assert.deepEqual(shownPair(entry([], 0, 0.25, 0.5)), [0, 0.5]);
  assert.deepEqual(shownPair(entry([0.5, 0], 0.5)), [0.5, 0.5], "an export without plain");
});

test("the history is bounded by entries and bytes, and has the newest", () => {
  const entries = [1, 2, 3, 4].map((id) => ({ id, images: { 0: { blob: { size: 10 } }, 0.5: { blob: { size: 10 } } } }));
  const surplus = (...bounds) => surplusOf(entries, ...bounds).map(({ id }) => id);
  assert.deepEqual(surplus(3, 1000), [1]);
  assert.deepEqual(surplus(10, 45), [2, 1]);
  assert.deepEqual(surplus(10, 1), [3, 2, 1], "the newest stays");
});

test("ticks are round and around all values", () => {
  assert.deepEqual(ticksOf(0.42, 0.53), [0.4, 0.45, 0.5, 0.55]);
  assert.deepEqual(ticksOf(0, 3.6), [0, 1, 2, 3, 4]);
  assert.deepEqual(ticksOf(2, 2).length >= 1, true);
});
