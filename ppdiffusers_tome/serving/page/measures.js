// Distances between two images, and the comparison of two sets of times. This module needs no document.

const SCALES = [16, 32, 64, 128, 255]; // levels that may be white in a difference map
const MIN_TIMES = 9; // of fewer, the quartiles are too often apart by chance (benchmarks/gain_rule.py)
const NEAR = 1.02; // speed-up: a smaller one may be the noise of a busy machine. clock.py has the same margin

/** Mean squared error over pixels and colors. */
function squaredError(a, b) {
  let sum = 0;
  for (let i = 0; i < a.data.length; i += 4) {
    for (let c = i; c < i + 3; c++) sum += (a.data[c] - b.data[c]) ** 2;
  }
  return sum / (a.data.length * 0.75);
}

/** PSNR in dB over pixels and colors; Infinity for equal images. */
export function psnr(a, b) {
  return 10 * Math.log10(255 ** 2 / squaredError(a, b));
}

/** Root of the mean squared difference, in levels of 255; 0 for equal images. */
export function rms(a, b) {
  return Math.sqrt(squaredError(a, b));
}

/** Wang et al. 2004: gray, Gaussian windows of 11 pixels, without downsampling (ssim.js, a global of its own script). */
export function ssim(a, b) {
  return globalThis.ssim.ssim(a, b, { ssim: "fast", downsample: false }).mssim;
}

/** The text of a similarity, rounded so that only equal images have 1. */
export function roundedSimilarity(value, format) {
  return value < 1 && value >= 0.9995 ? `> ${format(0.999)}` : format(value);
}

/** The largest difference of each pixel's colors: {levels, largest, mean}. */
export function differenceOf(a, b) {
  const levels = new Uint8Array(a.data.length / 4);
  for (let i = 0; i < a.data.length; i++) {
    if (i % 4 < 3) levels[i >> 2] = Math.max(levels[i >> 2], Math.abs(a.data[i] - b.data[i]));
  }
  let largest = 0;
  let sum = 0;
  for (const level of levels) {
    largest = Math.max(largest, level);
    sum += level;
  }
  return { levels, largest, mean: sum / levels.length };
}

/** The level that is white in a map with this largest difference. */
export function whiteOf(largest) {
  return SCALES.find((scale) => scale >= largest);
}

/** RGBA of a difference map, from black (0) over orange (a quarter of white) to white: roots, so that small levels show. */
export function mapOf(levels, white) {
  const colors = new Uint8ClampedArray(4 * levels.length);
  levels.forEach((level, pixel) => {
    const value = Math.sqrt(level / white);
    colors.set([510 * value, 340 * value - 85, 510 * value - 255, 255], 4 * pixel); // clamped to 0…255
  });
  return colors;
}

/** Median and quartiles, as numpy.quantile computes them; null without values. */
export function spreadOf(values) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  const at = (share) => {
    const place = share * (sorted.length - 1);
    const low = Math.floor(place);
    return sorted[low] + (place - low) * ((sorted[low + 1] ?? sorted[low]) - sorted[low]);
  };
  return { median: at(0.5), low: at(0.25), high: at(0.75), count: sorted.length };
}

/**
 * How two spreads of seconds per step compare.
 * @returns {{kind: "unknown"|"same"|"differs", factor: number}} the speed-up of the second over the first; "same" if the
 * spreads overlap or the medians are near each other, "unknown" if there are too few times
 */
export function compareTimes(a, b) {
  if (!a || !b || a.count < MIN_TIMES || b.count < MIN_TIMES) return { kind: "unknown", factor: NaN };
  const factor = a.median / b.median;
  const isNear = Math.max(factor, 1 / factor) <= NEAR;
  const overlap = a.low <= b.high && b.low <= a.high;
  return { kind: overlap || isNear ? "same" : "differs", factor };
}
