// Places of the parts of a plot. This module needs no document.

const HEIGHT = 11; // px of a label's text
const RADIUS = 6; // px around a point that labels leave free
const FAR = 6; // what another px between a label and its point costs, in px² of a covered point

/** Round numbers below, between and above two numbers. */
export function ticksOf(low, high, most = 4) {
  const rough = (high - low || Math.abs(high) || 1) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const first = Math.floor(low / step);
  const count = Math.ceil(high / step) - first;
  return Array.from({ length: count + 1 }, (_, index) => +((first + index) * step).toPrecision(12));
}

/** The approximate width of a bold label: Chinese characters are square. */
const widthOf = (name) => [...name].reduce((width, char) => width + (char > "\u2e80" ? HEIGHT : 0.65 * HEIGHT), 0);

const overlap = (a, b) =>
  Math.max(0, Math.min(a.right, b.right) - Math.max(a.left, b.left)) * Math.max(0, Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top));

const distance = ({ x, y }, box) => Math.hypot(Math.max(box.left - x, 0, x - box.right), Math.max(box.top - y, 0, y - box.bottom));

/**
 * Places of labels beside their points where they overlap neither each other nor a point, or as little as possible.
 * @param points {x, y, name} in px
 * @param area {left, right, top, bottom} of the plot
 * @returns {{x: number, y: number}[]} the start of the baseline of each label
 */
export function placeLabels(points, area) {
  const taken = points.map(({ x, y }) => ({ left: x - RADIUS, right: x + RADIUS, top: y - RADIUS, bottom: y + RADIUS, weight: 1 }));
  const places = new Map();
  for (const point of points.toSorted((a, b) => a.y - b.y)) {
    const { x, y, name } = point;
    const width = widthOf(name);
    const boxAt = (left, top) => ({ left, right: left + width, top, bottom: top + HEIGHT });
    const columns = [x + RADIUS, x - RADIUS - width, x - width / 2];
    const boxes = [1.5, 2.7, 3.9, 5.1].flatMap((rows) =>
      columns.flatMap((left) => [boxAt(left, y - rows * HEIGHT), boxAt(left, y + (rows - 1) * HEIGHT)]),
    );
    boxes.push(...columns.slice(0, 2).map((left) => boxAt(left, y - HEIGHT + 2)));
    const cost = (box) => {
      const outside = Math.max(0, area.left - box.left, box.right - area.right, area.top - HEIGHT - box.top, box.bottom - area.bottom - 2);
      return taken.reduce((sum, covered) => sum + covered.weight * overlap(box, covered), 100 * outside + FAR * Math.max(0, distance(point, box) - 1.5 * RADIUS));
    };
    const best = boxes.reduce((a, b) => (cost(b) < cost(a) ? b : a));
    taken.push({ ...best, weight: 4 });
    places.set(point, { x: best.left, y: best.bottom - 2 });
  }
  return points.map((point) => places.get(point));
}
