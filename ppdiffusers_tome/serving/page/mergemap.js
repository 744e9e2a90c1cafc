// Draw which tokens merged over their image. This module needs no document.

const SIDE = 512; // pixels of the longer side, approximately
const CELL = 8; // smallest side of a token in pixels

/** Red, green and blue of a group's outline: hues by the golden ratio, so that those of neighbours are far apart. */
function colorOf(group) {
  const hue = 6 * ((group * 0.618034) % 1);
  return [5, 3, 1].map((offset) => {
    const k = (offset + hue) % 6;
    return Math.round(255 * (1 - Math.max(0, Math.min(k, 4 - k, 1))));
  });
}

/** The number of tokens before and after merging: {tokens, groups}. */
export function countOf({ groups }) {
  return { tokens: groups.length, groups: new Set(groups).size };
}

/**
 * Draw groups of merged tokens: filled with the mean color of their pixels, with an outline of a color of their own. A
 * token that did not merge shows the image.
 * @param map {width, height, groups}: the group of each token, row by row
 * @param image the pixels: {data, width, height}
 * @returns {{data: Uint8ClampedArray, width: number, height: number}} RGBA
 */
export function drawGroups({ width, height, groups }, image) {
  const cell = Math.max(CELL, Math.round(SIDE / Math.max(width, height)));
  const line = Math.max(1, Math.round(cell / 8));
  const size = 1 + groups.reduce((most, group) => Math.max(most, group), 0);
  const [counts, pixels, sums] = [new Uint32Array(size), new Uint32Array(size), new Float64Array(3 * size)];
  for (const group of groups) counts[group]++;
  for (let y = 0; y < image.height; y++) {
    for (let x = 0; x < image.width; x++) {
      const group = groups[Math.floor((y * height) / image.height) * width + Math.floor((x * width) / image.width)];
      pixels[group]++;
      for (let c = 0; c < 3; c++) sums[3 * group + c] += image.data[4 * (y * image.width + x) + c];
    }
  }
  const result = { data: new Uint8ClampedArray(4 * width * height * cell * cell), width: width * cell, height: height * cell };
  const groupAt = (column, row) => (column < 0 || row < 0 || column >= width || row >= height ? -1 : groups[row * width + column]);
  for (let y = 0; y < result.height; y++) {
    for (let x = 0; x < result.width; x++) {
      const [column, row] = [Math.floor(x / cell), Math.floor(y / cell)];
      const group = groups[row * width + column];
      const at = 4 * (y * result.width + x);
      result.data[at + 3] = 255;
      if (counts[group] < 2) {
        const [ix, iy] = [Math.floor((x * image.width) / result.width), Math.floor((y * image.height) / result.height)];
        const from = 4 * (iy * image.width + ix);
        result.data.set(image.data.subarray(from, from + 3), at);
        continue;
      }
      const [dx, dy] = [x - column * cell, y - row * cell];
      const isOutline =
        (dx < line && groupAt(column - 1, row) !== group) ||
        (dx >= cell - line && groupAt(column + 1, row) !== group) ||
        (dy < line && groupAt(column, row - 1) !== group) ||
        (dy >= cell - line && groupAt(column, row + 1) !== group);
      const color = isOutline ? colorOf(group) : [0, 1, 2].map((c) => sums[3 * group + c] / pixels[group]);
      result.data.set(color, at);
    }
  }
  return result;
}
