import assert from "node:assert/strict";
import test from "node:test";
import { countOf, drawGroups } from "./page/mergemap.js";

// 2 × 2 tokens of 2 × 2 pixels: the two on the left merge, each of the others stays.
const MAP = { width: 2, height: 2, groups: [1, 0, 1, 2] };
const COLORS = { 0: [0, 0, 255], 1: [100, 0, 0], 2: [0, 200, 0], 3: [10, 20, 30] };
const image = { width: 4, height: 4, data: new Uint8ClampedArray(64) };
for (let y = 0; y < 4; y++) {
  for (let x = 0; x < 4; x++) image.data.set([...COLORS[(y >> 1) * 2 + (x >> 1)], 255], 4 * (4 * y + x));
}
const { data, width, height } = drawGroups(MAP, image);
const at = (x, y) => [...data.subarray(4 * (y * width + x), 4 * (y * width + x) + 3)];

test("tokens and groups", () => assert.deepEqual(countOf(MAP), { tokens: 4, groups: 3 }));

test("a group has the mean color of its pixels and an outline around all of it; others show the image", () => {
  assert.deepEqual([width, height], [512, 512]);
  assert.deepEqual(at(384, 128), COLORS[1]);
  assert.deepEqual(at(384, 384), COLORS[3]);
  assert.deepEqual(at(128, 128), [0, 100, 128], "the mean of both, rounded");
  assert.deepEqual(at(128, 256), [0, 100, 128], "no line between tokens of one group");
  const outline = at(2, 128);
  for (const [x, y] of [[128, 2], [128, 509], [254, 384], [2, 384]]) assert.deepEqual(at(x, y), outline);
  assert.notDeepEqual(outline, [0, 100, 128]);
});

test("groups of any size of tokens and image", () => {
  const wide = drawGroups({ width: 100, height: 50, groups: Array.from({ length: 5000 }, (_, i) => i >> 1) }, image);
  assert.deepEqual([wide.width, wide.height, wide.data.length], [800, 400, 4 * 800 * 400]);
});
