// How far two images are apart: PSNR, SSIM (by the vendored ssim.js, a global of its own script), and a map.

const SCALES = [16, 32, 64, 128, 255]; // levels that may be white in the difference map

/** The pixels of a PNG. */
export async function pixelsOf(blob) {
  const bitmap = await createImageBitmap(blob, { colorSpaceConversion: "none" });
  const canvas = new OffscreenCanvas(bitmap.width, bitmap.height);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(bitmap, 0, 0);
  return context.getImageData(0, 0, bitmap.width, bitmap.height);
}

/** Mean squared error over pixels and colors as PSNR in dB; Infinity for equal images. */
export function psnr(a, b) {
  let sum = 0;
  for (let i = 0; i < a.data.length; i += 4) {
    for (let c = i; c < i + 3; c++) sum += (a.data[c] - b.data[c]) ** 2;
  }
  return 10 * Math.log10(255 ** 2 / (sum / (a.data.length * 0.75)));
}

/** Wang et al. 2004: gray, Gaussian windows of 11 pixels, without downsampling. */
export function ssim(a, b) {
  return globalThis.ssim.ssim(a, b, { ssim: "fast", downsample: false }).mssim;
}

/** Draw the largest difference of each pixel's colors, from black (0) over orange to white (a level that is returned). */
export function drawDifference(canvas, a, b) {
  canvas.width = a.width;
  canvas.height = a.height;
  const differences = new Uint8Array(a.width * a.height);
  for (let i = 0; i < a.data.length; i++) {
    if (i % 4 < 3) differences[i >> 2] = Math.max(differences[i >> 2], Math.abs(a.data[i] - b.data[i]));
  }
  const largest = differences.reduce((most, difference) => Math.max(most, difference), 0);
  const mean = differences.reduce((sum, difference) => sum + difference, 0) / differences.length;
  const white = SCALES.find((scale) => scale >= largest);
  const map = new ImageData(a.width, a.height);
  differences.forEach((difference, pixel) => {
    const value = difference / white;
    map.data.set([510 * value, 340 * value - 85, 510 * value - 255, 255], 4 * pixel); // clamped to 0…255
  });
  canvas.getContext("2d").putImageData(map, 0, 0);
  return { largest, mean, white };
}
