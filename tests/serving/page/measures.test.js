import assert from "node:assert/strict";
import test from "node:test";
import { compareTimes, differenceOf, mapOf, psnr, rms, roundedSimilarity, spreadOf, whiteOf } from "./page/measures.js";

const image = (...colors) => ({ data: Uint8ClampedArray.from(colors.flatMap((color) => [...color, 255])), width: colors.length, height: 1 });

test("distances between images", () => {
  const [a, b] = [image([10, 20, 30], [0, 0, 0]), image([13, 20, 26], [0, 0, 0])];
  assert.equal(rms(a, b), Math.sqrt((9 + 16) / 6));
  assert.ok(Math.abs(psnr(a, b) - 10 * Math.log10(255 ** 2 / (25 / 6))) < 1e-9);
  assert.equal(psnr(a, a), Infinity);
  const { levels, largest, mean } = differenceOf(a, b);
  assert.deepEqual([[...levels], largest, mean], [[4, 0], 4, 2]);
});

test("a map is black without a difference and white at its end", () => {
  assert.deepEqual([0, 16, 17, 255].map(whiteOf), [16, 16, 32, 255]);
  assert.deepEqual([...mapOf(Uint8Array.of(0, 8, 32), 32)], [0, 0, 0, 255, 255, 85, 0, 255, 255, 255, 255, 255]);
});

test("1.000 is for equal images only", () => {
  const format = (value) => value.toFixed(3);
  assert.deepEqual([1, 0.99951, 0.9994, 0.5].map((value) => roundedSimilarity(value, format)), ["1.000", "> 0.999", "0.999", "0.500"]);
});

test("median and quartiles are numpy's", () => {
  assert.deepEqual(spreadOf([4, 1, 3, 2]), { median: 2.5, low: 1.75, high: 3.25, count: 4 });
  assert.deepEqual(spreadOf([2]), { median: 2, low: 2, high: 2, count: 1 });
  assert.equal(spreadOf([]), null);
});

test("times differ where their spreads do not overlap", () => {
  const times = (...values) => [...values, ...values, ...values];
  const compare = (a, b) => compareTimes(spreadOf(a), spreadOf(b));
  assert.deepEqual(compare(times(2, 2.1, 2.2), times(1, 1.05, 1.1)), { kind: "differs", factor: 2 });
  assert.equal(compare(times(1, 1.05, 1.1), times(2, 2.1, 2.2)).factor, 0.5);
  assert.equal(compare(times(1, 2, 3), times(1.5, 2.5, 3.5)).kind, "same");
  assert.equal(compare(times(1, 1, 1), times(1.01, 1.01, 1.01)).kind, "same");
  assert.equal(compare(times(1, 1, 1), times(1.03, 1.03, 1.03)).kind, "differs");
  assert.equal(compare(times(1, 1, 1).slice(1), times(2, 2, 2)).kind, "unknown");
  assert.equal(compareTimes(null, spreadOf(times(1, 1, 1))).kind, "unknown");
});
