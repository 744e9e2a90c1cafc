import assert from "node:assert/strict";
import test from "node:test";
import { shownPair } from "./page/compare.js";
import { surplusOf } from "./page/history.js";
import { placeLabels, ticksOf } from "./page/plot.js";
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

test("labels of points that are near each other do not overlap", () => {
  const area = { left: 40, right: 308, top: 12, bottom: 168 };
  const near = [[300, 168, "plain"], [302, 160, "0.25"], [296, 150, "0.5"], [305, 145, "0.75"]];
  const points = near.map(([x, y, name]) => ({ x, y, name }));
  const boxes = placeLabels(points, area).map(({ x, y }, index) => ({ x, y, width: 6 * points[index].name.length }));
  for (const [index, a] of boxes.entries()) {
    assert.ok(a.x >= area.left && a.x + a.width <= area.right && a.y <= area.bottom, `${points[index].name} is inside`);
    for (const b of boxes.slice(index + 1)) {
      assert.ok(Math.abs(a.y - b.y) >= 9 || a.x + a.width <= b.x || b.x + b.width <= a.x, JSON.stringify(boxes));
    }
    for (const { x, y } of points) assert.ok(x + 4 < a.x || x - 4 > a.x + a.width || y + 4 < a.y - 8 || y - 4 > a.y);
  }
  const [plain, above] = placeLabels([{ x: 283, y: 168, name: "plain" }, { x: 272, y: 157, name: "0.25" }], area);
  assert.ok(plain.y === 168 && plain.x < 272 && above.y < 157, "beside its point, and not where it would name the other one");
  const alone = placeLabels([{ x: 100, y: 100, name: "0.5" }], area)[0];
  assert.ok(alone.x > 100 && alone.x < 112 && alone.y < 100 && alone.y > 88, "to the right and above");
});
