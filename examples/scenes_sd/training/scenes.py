"""Compose scenes: one to three things before a textured background, with a caption that names all of it.

    python scenes.py things.npz                          # once: cut out the 109 things, from npm packages of 20 MB
    python scenes.py things.npz --output DIR --count 48  # write scenes as PNG files, and a sheet of the first 48

`Scenes(THINGS)(seed, size)` composes scene number `seed`. There are as many as there are seeds, and no two are equal.
Seeds below FIRST_TRAINING_SEED are never trained on: they are for tests, for sheets and as reference images. Pairs of
a thing and a background for which `is_held_out` is true are in no training image, so captions that name them are new.

Needs opencv-python-headless, NumPy and Pillow; resvg-py too for things.npz.
"""

import argparse
import colorsys
import hashlib
import io
import json
import math
import sys
from pathlib import Path

import cv2
import numpy as np
from PIL import Image

ROOT = Path(__file__).parents[3]
THINGS = (ROOT / "examples" / "emoji_sd" / "training" / "concepts.txt").read_text(encoding="utf-8").split()
STYLES = ("a 3d render of", "a flat drawing of")
# Frequent things, as in photographs a few kinds are in most of them: three of four things are one of these.
FREQUENT = ["fox", "owl", "penguin", "frog", "duck", "octopus", "tulip", "cactus", "sunflower", "mushroom", "pizza"]
FREQUENT += ["avocado", "strawberry", "cupcake", "watermelon", "teapot"]
FREQUENT_SHARE = 0.75
FIRST_TRAINING_SEED = 1_000_000
SIDE = 256  # px of a cut-out thing

# Name of a colour: hue in degrees, saturation, value; each scene varies them a little.
COLOURS = {
    "red": (2, 0.75, 0.72),
    "orange": (26, 0.80, 0.85),
    "yellow": (47, 0.75, 0.88),
    "green": (115, 0.55, 0.58),
    "teal": (178, 0.60, 0.60),
    "blue": (215, 0.65, 0.70),
    "purple": (275, 0.50, 0.62),
    "pink": (335, 0.45, 0.86),
    "brown": (24, 0.55, 0.48),
    "gray": (215, 0.06, 0.58),
    "black": (230, 0.15, 0.16),
    "white": (45, 0.08, 0.86),
}


CHANCES = np.where([thing in FREQUENT for thing in THINGS], FREQUENT_SHARE / len(FREQUENT), 0)
CHANCES += np.where(CHANCES > 0, 0, (1 - FREQUENT_SHARE) / (len(THINGS) - len(FREQUENT)))


def is_held_out(thing, background):
    """Whether training leaves this pair out: about one in twelve."""
    return hashlib.sha256(f"{thing} on {background}".encode()).digest()[0] % 12 == 0


# Backgrounds. Each takes a generator, a grid (x, y in 0..1, each [S, S]) and `shades`, which returns a colour near the
# one that the caption names: shades(light) -> [3], or [..., 3] for an array. Each returns [S, S, 3] in 0..1.


def noise(rng, size, cells, octaves=4, gain=0.5):
    """Smooth noise [size, size], about -1..1, of `cells` periods; each octave: half the size, `gain` the strength."""
    total, strength = np.zeros((size, size), np.float32), 1.0
    for _ in range(octaves):
        if cells * 2 > size:
            break
        coarse = rng.standard_normal((int(cells) + 3, int(cells) + 3), dtype=np.float32)
        total += strength * cv2.resize(coarse, (size, size), interpolation=cv2.INTER_CUBIC)
        cells, strength = cells * 2, strength * gain
    return total / (1.3 * total.std() + 1e-6) * 0.6


def turned(rng, x, y, limit=math.pi):
    """The grid turned by a random angle of at most `limit`."""
    a = rng.uniform(-limit, limit)
    return math.cos(a) * x - math.sin(a) * y, math.sin(a) * x + math.cos(a) * y


def smooth(value, low, high):
    """0 below `low`, 1 above `high`, and smooth between."""
    t = np.clip((value - low) / (high - low), 0, 1)
    return t * t * (3 - 2 * t)


def per_cell(rng, *cells):
    """A random number in 0..1 for each cell that has the same integer coordinates."""
    key = np.zeros(cells[0].shape, np.int64)
    for cell in cells:
        key = key * 131 + cell.astype(np.int64)
    return rng.random(4099, dtype=np.float32)[key % 4099]


def bricks(rng, x, y, shades):
    u, v = turned(rng, x, y, 0.2)
    rows = rng.uniform(6, 11)
    row = np.floor(v * rows)
    s, t = u * rows / rng.uniform(1.8, 2.6) + (row % 2) / 2, v * rows
    edge = np.minimum(np.minimum(s % 1, 1 - s % 1) * 2.2, np.minimum(t % 1, 1 - t % 1))
    stone = shades(per_cell(rng, row + 50, np.floor(s) + 50) * 0.7 - 0.35 + 0.16 * noise(rng, len(x), 24, 3))
    mortar = np.full(3, rng.uniform(0.45, 0.72), np.float32) * (1 + 0.1 * noise(rng, len(x), 20, 3)[..., None])
    return mortar + smooth(edge, 0.05, 0.11)[..., None] * (stone - mortar)


def cells_of(rng, x, y, count):
    """Voronoi cells of a jittered grid: distance to the nearest and second nearest centre, and a number per cell."""
    u, v = x * count, y * count
    best = np.full(x.shape, 9, np.float32)
    second, owner = best.copy(), np.zeros(x.shape, np.int64)
    jitter = rng.uniform(0.1, 0.9, (2, 64, 64)).astype(np.float32)
    i, j = np.floor(u).astype(int), np.floor(v).astype(int)
    for a in (-1, 0, 1):
        for b in (-1, 0, 1):
            p, q = (i + a) % 64, (j + b) % 64
            d = np.hypot(i + a + jitter[0, p, q] - u, j + b + jitter[1, p, q] - v)
            nearer = d < best
            second = np.where(nearer, best, np.minimum(second, d))
            owner = np.where(nearer, p * 64 + q, owner)
            best = np.where(nearer, d, best)
    return best, second, rng.random(4096, dtype=np.float32)[owner]


def gravel(rng, x, y, shades):
    near, second, number = cells_of(rng, x, y, rng.uniform(8, 15))
    edge = smooth(second - near, 0.02, 0.3)
    return (
        shades(number * 0.9 - 0.45 + 0.3 * (0.5 - near) + 0.08 * noise(rng, len(x), 24, 2))
        * (0.25 + 0.75 * edge)[..., None]
    )


def wood(rng, x, y, shades):
    u, v = turned(rng, x, y, 0.3)
    planks = rng.uniform(2.5, 5)
    plank = np.floor(v * planks)
    offset = per_cell(rng, plank + 50) * 7
    bend = cv2.resize(rng.standard_normal((7, 4), dtype=np.float32), x.shape[::-1], interpolation=cv2.INTER_CUBIC)
    rings = np.sin(2 * math.pi * (v * rng.uniform(9, 15) + 0.7 * bend + u * 0.8 + offset))
    seam = smooth(np.minimum((v * planks) % 1, 1 - (v * planks) % 1), 0.0, 0.05)
    fine = cv2.GaussianBlur(noise(rng, len(x), 40, 2), (0, 0), len(x) / 60, sigmaY=0.6)
    return shades(0.22 * rings + 0.35 * (offset / 7 - 0.5) + 0.25 * fine) * (0.45 + 0.55 * seam)[..., None]


def clouds(rng, x, y, shades):
    cover = smooth(noise(rng, len(x), rng.uniform(2, 4), 6, 0.55) + rng.uniform(-0.2, 0.3), -0.1, 0.9)
    sky = shades(0.35 * (y - 0.5) + 0 * x)
    light = 0.80 + 0.08 * noise(rng, len(x), 3, 5)
    return sky + 0.85 * cover[..., None] * (light[..., None] - sky)


def strokes(rng, size, count, shades, make):
    """Blades over each other; make(t) -> start, bend, length and width of one, t in 0..1 from back to front."""
    image = np.empty((size, size, 3), np.float32)
    image[:] = shades(-0.5)
    for t in np.linspace(0, 1, count):
        (px, py), bend, length, width = make(t)
        s = np.linspace(0, 1, 6)
        points = np.stack([px + bend * s * s, py - length * s], 1) * size * 16
        cv2.polylines(
            image,
            [points.astype(np.int32)],
            False,
            shades(rng.uniform(-0.5, 0.5)).tolist(),
            max(1, round(width * size)),
            cv2.LINE_AA,
            4,
        )
    return image


def grass(rng, x, y, shades):
    long = rng.uniform(0.1, 0.22)

    def blade(t):
        return (rng.uniform(-0.1, 1.1), rng.uniform(0, 0.15) + t * 1.05), rng.normal(0, 0.05), long, 0.009 + 0.008 * t

    return strokes(rng, len(x), 420, shades, blade)


def waves(rng, x, y, shades):
    depth = 0.25 + y  # nearer rows are larger
    ripple = np.sin(2 * math.pi * (rng.uniform(3, 5) / depth * 1.6 + 0.5 * noise(rng, len(x), 3, 3)))
    foam = smooth(ripple + 0.6 * noise(rng, len(x), 7, 4), 0.9, 1.5)
    sea = shades(0.28 * ripple + 0.15 * noise(rng, len(x), 10, 3))
    return sea + 0.6 * foam[..., None] * (0.9 - sea)


def marble(rng, x, y, shades):
    u, _ = turned(rng, x, y)
    vein = np.abs(np.sin(math.pi * (u * rng.uniform(2, 4) + 0.9 * noise(rng, len(x), 2.5, 6, 0.55))))
    return shades(0.4 * smooth(vein, 0.0, 0.5) - 0.25 + 0.12 * noise(rng, len(x), 4, 4))


def leaves(rng, x, y, shades):
    size = len(x)
    image = np.empty((size, size, 3), np.float32)
    image[:] = shades(-0.45)
    for radius in np.sort(0.035 / rng.uniform(0.12, 1, 260) ** 0.6)[::-1]:  # sizes follow a power law: dead leaves
        centre, angle = rng.uniform(-0.05, 1.05, 2), rng.uniform(0, 2 * math.pi)
        direction = np.array([math.cos(angle), math.sin(angle)])
        across = np.array([-direction[1], direction[0]])
        s = np.linspace(-1, 1, 9)[:, None]
        side = 0.45 * (1 - s * s) * across
        outline = centre + radius * np.concatenate([s * direction + side, s[::-1] * direction - side[::-1]])
        light = rng.uniform(-0.45, 0.5)
        cv2.fillPoly(image, [(outline * size * 16).astype(np.int32)], shades(light).tolist(), cv2.LINE_AA, 4)
        ends = ((centre + radius * np.array([[-1], [0.9]]) * direction) * size * 16).astype(np.int32)
        cv2.line(image, ends[0].tolist(), ends[1].tolist(), shades(light - 0.3).tolist(), 1, cv2.LINE_AA, 4)
    return image


def checks(rng, x, y, shades):
    u, v = turned(rng, x, y)
    count = rng.uniform(5, 10)
    board = np.sin(math.pi * u * count) * np.sin(math.pi * v * count)
    soft = 60 / len(x) * count / 8
    return shades(0.75 * smooth(board, -soft * 0.3, soft * 0.3) - 0.4 + 0.05 * noise(rng, len(x), 16, 3))


def stripes(rng, x, y, shades):
    u, _ = turned(rng, x, y)
    wave = np.sin(2 * math.pi * u * rng.uniform(4, 9)) + rng.uniform(-0.5, 0.5)
    return shades(0.75 * smooth(wave, -0.15, 0.15) - 0.4 + 0.05 * noise(rng, len(x), 16, 3))


def dots(rng, x, y, shades):
    u, v = turned(rng, x, y)
    count = rng.uniform(6, 11)
    row = np.floor(v * count)
    d = np.hypot((u * count + (row % 2) / 2) % 1 - 0.5, (v * count) % 1 - 0.5)
    r = rng.uniform(0.22, 0.36)
    return shades(0.8 * smooth(-d, -r - 0.06, -r + 0.06) - 0.35 + 0.05 * noise(rng, len(x), 16, 3))


def fog(rng, x, y, shades):
    u, _ = turned(rng, x, y)
    return shades(0.9 * (u - u.mean()) + 0.18 * noise(rng, len(x), 3, 3) + 0.10 * noise(rng, len(x), 40, 2))


def mountains(rng, x, y, shades):
    size = len(x)
    image = shades(0.55 - 0.3 * y)
    for k in range(4):
        ridge = np.interp(x[0], np.linspace(0, 1, 24), rng.standard_normal(24).cumsum()[:24] * 0.035)
        height = 0.25 + 0.18 * k + rng.uniform(-0.04, 0.04) - (ridge - ridge.mean())[None]
        rock = shades(0.3 - 0.28 * k + 0.12 * noise(rng, size, 8, 4))
        image = image + smooth(y - height, 0, 0.01)[..., None] * (rock - image)
    return image


def weave(rng, x, y, shades):
    u, v = turned(rng, x, y)
    count = rng.uniform(9, 15)
    over = (np.floor(u * count) + np.floor(v * count)) % 2
    a, b = np.sin(math.pi * ((u * count) % 1)), np.sin(math.pi * ((v * count) % 1))
    height = np.where(over > 0, a**0.7 * (0.6 + 0.4 * b), b**0.7 * (0.6 + 0.4 * a))
    return shades(0.9 * height - 0.62 + 0.12 * over + 0.08 * noise(rng, len(x), 30, 2))


def bubbles(rng, x, y, shades):
    size = len(x)
    image = shades(0.3 * (0.5 - y) - 0.15)
    for radius in np.sort(rng.uniform(0.02, 0.12, 40))[::-1]:
        cx, cy = rng.uniform(0, 1, 2)
        d = np.hypot(x - cx, y - cy) / radius
        inside = smooth(-d, -1.0 - 1.5 / (radius * size), -1.0 + 1.5 / (radius * size))
        gleam = smooth(-np.hypot(x - cx + 0.35 * radius, y - cy + 0.35 * radius) / radius, -0.3, -0.1)
        ball = shades(0.45 * d * d - 0.1)
        image = image + 0.8 * inside[..., None] * (ball - image) + 0.35 * (inside * gleam)[..., None]
    return image


def scales(rng, x, y, shades):
    count = rng.uniform(5, 9)
    u, v = turned(rng, x, y, 0.4)
    u, v = u * count, v * count * 1.6
    height, number = np.full(x.shape, -9.0, np.float32), np.zeros(x.shape, np.float32)
    for k in (1, 0, -1):  # the rows above lie over those below
        row = np.floor(v) + k
        column = np.floor(u + (row % 2) / 2)
        d = np.hypot(u + (row % 2) / 2 - column - 0.5, (v - row) / 1.6 - 0.1) / 0.62
        inside = (d < 1) & (v - row >= 0)
        height = np.where(inside, 1 - d * d, height)
        number = np.where(inside, per_cell(rng, row + 90, column + 90), number)
    return shades(np.where(height < 0, -0.5, 0.55 * smooth(height, 0, 0.5) - 0.4 + 0.3 * number))


def night(rng, x, y, shades):
    size = len(x)
    image = shades(0.22 * noise(rng, size, 2.5, 5, 0.6) - 0.3 * (1 - y)) * 0.55
    stars = np.zeros((size, size), np.float32)
    for px, py in rng.uniform(0, size, (70, 2)):
        centre = (int(px * 16), int(py * 16))
        cv2.circle(stars, centre, int(16 * size / 256 * rng.uniform(0.5, 1.7)), 1.0, -1, cv2.LINE_AA, 4)
    return image + (0.95 - image) * np.minimum(stars, 1)[..., None]


BACKGROUNDS = {
    "bricks": bricks,
    "gravel": gravel,
    "wood": wood,
    "clouds": clouds,
    "grass": grass,
    "waves": waves,
    "marble": marble,
    "leaves": leaves,
    "checks": checks,
    "stripes": stripes,
    "dots": dots,
    "fog": fog,
    "mountains": mountains,
    "weave": weave,
    "bubbles": bubbles,
    "scales": scales,
    "night sky": night,
}
OFTEN = {"grass": ("green", "yellow", "teal"), "clouds": ("blue", "pink", "orange"), "wood": ("brown", "orange")}
GRIDS = {
    size: tuple(np.meshgrid(*[(np.arange(size, dtype=np.float32) + 0.5) / size] * 2)) for size in (64, 128, 256, 512)
}


def shades_of(rng, colour):
    """A function from lightness (-0.5 dark, 0 as the colour's name says, 0.5 light) to RGB."""
    hue, saturation, value = COLOURS[colour]
    hue, value = hue + rng.normal(0, 5), value * rng.uniform(0.9, 1.08)
    saturation = np.clip(saturation * rng.uniform(0.8, 1.15), 0, 1)
    twist = rng.normal(0, 18)  # the hue of shadows against that of lights
    stops = np.array(
        [
            colorsys.hsv_to_rgb((hue - twist) / 360 % 1, min(saturation * 1.15, 1), value * 0.32),
            colorsys.hsv_to_rgb(hue / 360 % 1, saturation, min(value, 1)),
            colorsys.hsv_to_rgb((hue + twist) / 360 % 1, saturation * 0.5, min(value * 1.25 + 0.14, 1)),
        ],
        np.float32,
    )

    def shades(light):
        light = np.clip(np.asarray(light, np.float32), -0.5, 0.5)[..., None]
        dark, bright = np.minimum(light, 0) * -2, np.maximum(light, 0) * 2
        return stops[1] + dark * (stops[0] - stops[1]) + bright * (stops[2] - stops[1])

    return shades


class Scenes:
    """Composes scenes of the things in a file that `cut_out` wrote."""

    def __init__(self, file):
        data = np.load(file)
        self.things = data["rgba"]  # [109, 2 styles, SIDE, SIDE, 4] uint8
        self.shares = (self.things[..., 3] / 255.0).mean((2, 3))  # of the square that a thing covers

    def __call__(self, seed, size=256, counts=(0.1, 0.66, 0.18, 0.06)):
        """Scene number `seed` as uint8 [size, size, 3], and its caption.

        `counts` has the shares of scenes with no thing, one, two and three.
        """
        rng = np.random.default_rng(seed)
        background = str(rng.choice(list(BACKGROUNDS)))
        usual = OFTEN.get(background)
        colour = str(rng.choice(usual)) if usual and rng.random() < 0.7 else str(rng.choice(list(COLOURS)))
        count = int(rng.choice(len(counts), p=counts))
        chosen = [(int(i), int(rng.integers(2))) for i in rng.choice(len(THINGS), count, replace=False, p=CHANCES)]
        if seed >= FIRST_TRAINING_SEED and any(is_held_out(THINGS[i], background) for i, _ in chosen):
            return self(seed + (1 << 40), size, counts)
        image = BACKGROUNDS[background](rng, *GRIDS[size], shades_of(rng, colour))
        image = np.ascontiguousarray(image, np.float32)
        self.place(rng, image, chosen)
        x, y = GRIDS[size]
        u, _ = turned(rng, x - 0.5, y - 0.5)
        image *= (1 + rng.uniform(0, 0.35) * u - rng.uniform(0, 0.5) * ((x - 0.5) ** 2 + (y - 0.5) ** 2))[..., None]
        names = [f"{STYLES[style]} {THINGS[i].replace('-', ' ')}" for i, style in chosen]
        return (np.clip(image, 0, 1) * 255 + 0.5).astype(np.uint8), " and ".join(
            [*names[:-1], f"{names[-1]} on {colour} {background}"] if names else [f"{colour} {background}"]
        )

    def place(self, rng, image, chosen):
        """Draw things with shadows into the image; together they cover 20 to 60 % of it."""
        size = len(image)
        shares = rng.dirichlet(np.full(len(chosen), 6)) * rng.uniform(0.2, 0.6) if chosen else []
        taken = np.zeros((size, size), np.float32)
        for (i, style), share in zip(chosen, shares, strict=True):
            side = float(np.clip(math.sqrt(share / self.shares[i, style]), 0.28, 0.95))
            angle, mirror = rng.normal(0, 9), rng.random() < 0.5
            candidates = []
            for _ in range(8 if len(chosen) > 1 else 1):
                reach = max(0.5 - side / 2 + 0.08, 0.04)
                centre = 0.5 + rng.uniform(-reach, reach, 2)
                low, high = ((np.clip(centre + s * side / 2, 0, 1) * size).astype(int) for s in (-1, 1))
                candidates.append((float(taken[low[1] : high[1], low[0] : high[0]].sum()), tuple(centre)))
            centre = np.array(min(candidates)[1])
            scale = side * size / SIDE
            matrix = cv2.getRotationMatrix2D((SIDE / 2, SIDE / 2), angle, scale)
            matrix[:, 2] += centre * size - SIDE / 2
            thing = self.things[i, style]
            if mirror:
                thing = thing[:, ::-1]
            if scale < 0.6:  # area averages of the original, so that fine lines do not alias
                small = max(int(SIDE * scale * 1.4), 16)
                matrix[:, :2] *= SIDE / small
                thing = cv2.resize(thing, (small, small), interpolation=cv2.INTER_AREA)
            colours = thing[..., :3].astype(np.float32) * (thing[..., 3:] / np.float32(255 * 255))
            layer = np.concatenate([colours, thing[..., 3:].astype(np.float32) / 255], 2)
            layer = cv2.warpAffine(layer, matrix, (size, size), flags=cv2.INTER_LINEAR)
            alpha = layer[..., 3:]
            depth, blur = rng.uniform(0.01, 0.05, 2) * size * max(side, 0.4)
            shift = np.float32([[1, 0, rng.uniform(-1, 1) * depth], [0, 1, depth]])
            shadow = cv2.warpAffine(cv2.GaussianBlur(layer[..., 3], (0, 0), blur), shift, (size, size))
            image *= 1 - rng.uniform(0.3, 0.65) * shadow[..., None]
            image += layer[..., :3] * rng.uniform(0.82, 1.03) - alpha * image
            taken += layer[..., 3]


def cut_out(file):
    """Write the 109 things in both styles, on transparent ground, to an .npz file."""
    sys.path.append(str(ROOT / "benchmarks"))
    import reference_images as reference

    fluent, twemoji, noto = reference.fetch(file.parent / ".packages")
    files = {reference.code_of(Path(entry.name).name): entry for entry in fluent if entry.name.endswith(".webp")}
    icons = json.load(twemoji.extractfile("package/icons.json"))
    codes = {}
    for code, name in json.load(noto.extractfile("package/chars.json")).items():
        codes.setdefault(name, reference.code_of(code))
    rgba = np.empty((len(THINGS), 2, SIDE, SIDE, 4), np.uint8)
    for i, thing in enumerate(THINGS):
        render = Image.open(io.BytesIO(fluent.extractfile(files[codes[thing]]).read())).convert("RGBA")
        rgba[i, 0] = render.resize((SIDE, SIDE), Image.Resampling.LANCZOS)
        rgba[i, 1] = reference.render_icon(icons, thing, SIDE)
    np.savez_compressed(file, rgba=rgba)


def sheet(images, columns=8):
    """One picture of many of the same size, row by row."""
    rows = [np.concatenate(images[i : i + columns], 1) for i in range(0, len(images) - columns + 1, columns)]
    return Image.fromarray(np.concatenate(rows))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("things", type=Path, help="the things; made if the file does not exist")
    parser.add_argument("--output", type=Path, help="folder for the scenes")
    parser.add_argument("--count", type=int, default=48)
    parser.add_argument("--first", type=int, default=0, help="seed of the first scene (default: %(default)s)")
    parser.add_argument("--size", type=int, default=256, choices=GRIDS)
    options = parser.parse_args()
    if not options.things.exists():
        cut_out(options.things)
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        scenes = Scenes(options.things)
        images = []
        for seed in range(options.first, options.first + options.count):
            image, caption = scenes(seed, options.size)
            Image.fromarray(image).save(options.output / f"{seed:06d} {caption}.png")
            images.append(image)
        if len(images) >= 8:
            sheet(images[:48]).save(options.output / "sheet.png")


if __name__ == "__main__":
    main()
