// Where the parts of a plot are. Nothing here needs a document.

const HEIGHT = 11; // px of a label's text
const RADIUS = 6; // px around a point that labels leave free

/** Round numbers below, between and above two numbers. */
export function ticksOf(low, high, most = 4) {
  const rough = (high - low || Math.abs(high) || 1) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const first = Math.floor(low / step);
  const count = Math.ceil(high / step) - first;
  return Array.from({ length: count + 1 }, (_, index) => +((first + index) * step).toPrecision(12));
}

/** About the width of a bold label: characters of Chinese are square. */
const widthOf = (name) => [...name].reduce((width, one) => width + (one > "\u2e80" ? HEIGHT : 0.65 * HEIGHT), 0);

const overlap = (a, b) =>
  Math.max(0, Math.min(a.right, b.right) - Math.max(a.left, b.left)) * Math.max(0, Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top));

/**
 * Where labels overlap neither each other nor a point, if there is room beside their points; otherwise the least.
 * @param points {x, y, name} in px
 * @param area {left, right, top, bottom} of the plot
 * @returns {{x: number, y: number}[]} the start of the baseline of each label
 */
export function placeLabels(points, area) {
  const taken = points.map(({ x, y }) => ({ left: x - RADIUS, right: x + RADIUS, top: y - RADIUS, bottom: y + RADIUS }));
  return points.map(({ x, y, name }) => {
    const width = widthOf(name);
    const boxAt = (left, top) => ({ left, right: left + width, top, bottom: top + HEIGHT });
    const columns = [x + RADIUS, x - RADIUS - width, x - width / 2];
    const boxes = [1.5, 2.7, 3.9].flatMap((rows) =>
      columns.flatMap((left) => [boxAt(left, y - rows * HEIGHT), boxAt(left, y + (rows - 1) * HEIGHT)]),
    );
    const cost = (box) => {
      const outside = Math.max(0, area.left - box.left, box.right - area.right, area.top - HEIGHT - box.top, box.bottom - area.bottom);
      return taken.reduce((sum, one) => sum + overlap(box, one), 100 * outside);
    };
    const best = boxes.reduce((a, b) => (cost(b) < cost(a) ? b : a));
    taken.push(best);
    return { x: best.left, y: best.bottom - 2 };
  });
}
