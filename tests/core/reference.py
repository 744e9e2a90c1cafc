"""Token merging in plain NumPy loops, written from the paper: slow, but easy to check. The oracle of the tests.

It shares no code with the package, but implements the same rules for ties and NaN.
"""

import numpy as np


def dst_positions(h, w, sx, sy):
    """The top left token of every complete cell, in reading order."""
    positions = []
    for cell_y in range(h // sy):
        for cell_x in range(w // sx):
            positions.append(cell_y * sy * w + cell_x * sx)
    return positions


def cosine(a, b):
    """Cosine of the angle between two tokens; 0 if either is zero or holds NaN or infinity."""
    if not (np.isfinite(a).all() and np.isfinite(b).all() and a.any() and b.any()):
        return 0.0
    a, b = a.astype(np.float64), b.astype(np.float64)
    return a @ b / (np.sqrt(a @ a) * np.sqrt(b @ b))


def match(tokens, dst, removed):
    """For one image's tokens [N, C]: {src: dst} for the `removed` most similar pairs."""
    if removed == 0:  # also where the grid is smaller than one cell and has no dst
        return {}
    pairs = []
    for src in range(len(tokens)):
        if src in dst:
            continue
        similarities = [cosine(tokens[src], tokens[d]) for d in dst]
        best = int(np.argmax(similarities))  # the first of equals
        pairs.append((similarities[best], src, dst[best]))
    pairs.sort(key=lambda pair: (-pair[0], pair[1]))  # the lowest src of equals first
    return {src: d for _, src, d in pairs[:removed]}


def merge(tokens, dst, merged_into):
    """[N, C] -> {kept token: its mean}, by original position."""
    kept = {}
    for position in range(len(tokens)):
        if position in merged_into:
            continue
        group = [tokens[position].astype(np.float64)]
        for src, d in merged_into.items():
            if d == position:
                group.append(tokens[src].astype(np.float64))
        kept[position] = sum(group) / len(group)
    return kept


def unmerge(kept, merged_into, count):
    """The kept tokens' values copied to the place of every token: [N, C]."""
    return np.stack([kept[merged_into.get(position, position)] for position in range(count)])


def roundtrip(x, h, w, sx, sy, removed, dst=None):
    """[B, N, C] -> unmerge(merge(x)), and the group of each token: the position whose value it gets, [B, N]."""
    dst = dst_positions(h, w, sx, sy) if dst is None else [int(d) for d in dst]
    out, groups = [], []
    for tokens in x:
        merged_into = match(tokens, dst, removed)
        out.append(unmerge(merge(tokens, dst, merged_into), merged_into, h * w))
        groups.append([merged_into.get(position, position) for position in range(h * w)])
    return np.stack(out), np.array(groups)


BAYER = [[0, 8, 2, 10], [12, 4, 14, 6], [3, 11, 1, 9], [15, 7, 13, 5]]


def interlaced(h, w, parts, phase):
    """The tokens of a grid whose rank in their 4×4 cell has its turn, and those right of or below whole cells."""
    ranks = {(parts * phase + i) % 16 for i in range(parts)}
    kept = []
    for y in range(h):
        for x in range(w):
            is_in_cell = y < h // 4 * 4 and x < w // 4 * 4
            if not is_in_cell or BAYER[y % 4][x % 4] in ranks:
                kept.append(y * w + x)
    return kept
