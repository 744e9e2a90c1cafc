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


def windows(h, w, sx, sy, window):
    """For each token of the grid, (row, column) of its window.

    A window begins at every multiple of `window`, rounded up to a multiple of sx or sy; a remainder without a whole
    cell belongs to the window before it.
    """
    window_x, window_y = window + -window % sx, window + -window % sy  # rounded up to whole cells
    window_of = []
    for y in range(h):
        for x in range(w):
            row, column = y // window_y, x // window_x
            while row > 0 and h - row * window_y < sy:
                row -= 1
            while column > 0 and w - column * window_x < sx:
                column -= 1
            window_of.append((row, column))
    return window_of


def match(tokens, dst, removed, window_of=None):
    """For one image's tokens [N, C]: {src: dst} for the `removed` most similar pairs, of one window each if given."""
    if removed == 0:  # also where the grid is smaller than one cell and has no dst
        return {}
    pairs = []
    for src in range(len(tokens)):
        if src in dst:
            continue
        near = [d for d in dst if window_of is None or window_of[d] == window_of[src]]
        similarities = [cosine(tokens[src], tokens[d]) for d in near]
        best = int(np.argmax(similarities))  # the first of equals
        pairs.append((similarities[best], src, near[best]))
    pairs.sort(key=lambda pair: (-pair[0], pair[1]))  # the lowest src of equals first
    return {src: d for _, src, d in pairs[:removed]}


def pair_dst(w, sx, sy, dst):
    """Each dst and a second one of its cell: half a cell further down and right, or else up and left."""
    pairs = []
    for position in dst:
        y, x = position // w, position % w
        second_y = y + sy // 2 if y % sy < sy // 2 else y - sy // 2
        second_x = x + sx // 2 if x % sx < sx // 2 else x - sx // 2
        pairs += [position, second_y * w + second_x]
    return sorted(pairs)


def match_cells(h, w, sx, sy, dst, per_cell=1):
    """{src: dst} of the same cell, or of the same half of a cell of two dst, an upper and a lower one.

    The tokens of a remainder belong to the last cell of their row or column.
    """
    cell_of = []
    for y in range(h):
        for x in range(w):
            row = min(y // sy, h // sy - 1)
            is_lower_half = per_cell == 2 and y - row * sy >= sy // 2
            cell_of.append((row, is_lower_half, min(x // sx, w // sx - 1)))
    dst_of = {cell_of[d]: d for d in dst}
    return {src: dst_of[cell_of[src]] for src in range(h * w) if src not in dst}


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


def roundtrip(x, h, w, sx, sy, removed, dst=None, window=None):
    """[B, N, C] -> unmerge(merge(x)), and the group of each token: the position whose value it gets, [B, N]."""
    dst = dst_positions(h, w, sx, sy) if dst is None else [int(d) for d in dst]
    window_of = None if window is None else windows(h, w, sx, sy, window)
    out, groups = [], []
    for tokens in x:
        merged_into = match(tokens, dst, removed, window_of)
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
