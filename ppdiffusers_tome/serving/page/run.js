// The images that one press of a button generates. This module needs neither a document nor a server.

/** The ratios that a press generates, plain first: those of `wanted` that are exported and not generated yet. */
export function planOf(wanted, exported, images) {
  return wanted.filter((ratio, index) => exported.includes(ratio) && !images[ratio] && wanted.indexOf(ratio) === index);
}

/** The ratios for "Generate": 0 (plain) and the one in the form. */
export function pairOf(ratio) {
  return [0, ratio];
}

/** The ratios for "Compare all ratios": all exported ones, plain first. */
export function allOf(exported) {
  return [...exported].sort((a, b) => a - b);
}

/** The ratios for "Measure again": both in turns, so that a slow moment of the machine affects both. */
export function againOf(pair, times) {
  return Array.from({ length: times }, () => pair).flat();
}

/**
 * Generate images one after the other.
 * @param ratios in their order
 * @param generate makes the image of a ratio: (ratio, onProgress) => Promise
 * @param onState called with each change: {ratio, index, count, position, step, steps, wait}; `wait` seconds before
 *     another try, when the server was not ready
 * @param onImage called with each ratio and its image, as soon as it is there
 * @param sleep waits: (seconds) => Promise, which is rejected when the run is cancelled
 * @returns {Promise<void>} rejected with the first error other than 503; the images before it have been reported
 */
export async function runImages({ ratios, generate, onState, onImage, sleep }) {
  for (const [index, ratio] of ratios.entries()) {
    const start = { ratio, index, count: ratios.length, position: 0, step: 0, steps: 0, wait: 0 };
    for (let image = null; image === null; ) {
      onState(start);
      try {
        image = await generate(ratio, (progress) => onState({ ...start, ...progress }));
      } catch (error) {
        if (error.code !== "unavailable") throw error;
        const wait = Math.min(60, Number(error.values.seconds) || 5);
        onState({ ...start, wait });
        await sleep(wait);
        continue;
      }
      await onImage(ratio, image);
    }
  }
}

/** The share of a run that is finished; null while steps of the first image are not known. */
export function shareOf({ index, count, step, steps }) {
  if (steps === 0 && index === 0) return null;
  return (index + (steps ? step / steps : 0)) / count;
}

/** An image with the times of a second image of the same ratio added. The first step of each run only warms up. */
export function withTimes(earlier, image) {
  const steps = image.steps.slice(1);
  if (!earlier) return { ...image, steps, runs: 1 };
  const batch = Math.max(earlier.batch, image.batch);
  return { ...earlier, batch, steps: [...earlier.steps, ...steps], runs: earlier.runs + 1 };
}
