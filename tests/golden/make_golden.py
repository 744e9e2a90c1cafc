"""Record merging by tomesd 0.1.3 and write merge.npz. Needs PyTorch and tomesd, but not Paddle.

    python tests/golden/make_golden.py            (writes merge.npz beside this file)

Every case runs `tomesd.merge.bipartite_soft_matching_random2d(x, w, h, sx, sy, r, no_rand=True)` on one CPU thread.
README.md beside this file describes the format.

The records do not depend on tomesd's internal order of tokens. The group of a token follows from merging one-hot rows:
after `unmerge(merge(eye(N)))` row n is non-zero exactly at the tokens averaged together with n, and one of those is a
dst (the top left of its sx × sy cell) unless n was not merged. A case is rejected if rounding could change it: if, in
float64, a src token's best dst leads the second by less than MARGIN, or the r-th best edge leads the next one.
"""

import argparse
import json
import platform
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from tomesd.merge import bipartite_soft_matching_random2d

MARGIN = 1e-6  # in cosine; fp32 rounding of a cosine is about 1e-7
NORMAL, CLUSTERS, TIES = "normal", "clusters", "ties"


def case(name, b, h, w, c, sx, sy, r, seed, data=NORMAL):
    return {"name": name, "B": b, "h": h, "w": w, "C": c, "sx": sx, "sy": sy, "r": r, "seed": seed, "data": data}


# r is tomesd's argument; its caller computes int(N * ratio)
CASES = [
    case("square", 2, 8, 8, 5, 2, 2, 32, 1),
    case("square_large", 2, 16, 16, 3, 2, 2, 128, 2),
    case("wide", 2, 6, 10, 7, 2, 2, 30, 3),
    case("tall", 2, 10, 6, 7, 2, 2, 30, 4),
    case("one_row_of_cells", 1, 2, 14, 4, 2, 2, 14, 5),
    case("uneven_both_5x7", 2, 5, 7, 6, 2, 2, 17, 6),
    case("uneven_w_16x17", 2, 16, 17, 3, 2, 2, 136, 7),
    case("uneven_h_17x16", 2, 17, 16, 3, 2, 2, 136, 8),
    case("uneven_both_33x47", 1, 33, 47, 4, 2, 2, 775, 9),
    case("uneven_sx3_sy2_7x11", 1, 7, 11, 5, 3, 2, 38, 10),
    case("sx4_sy4", 2, 12, 16, 5, 4, 4, 96, 11),
    case("sx4_sy4_uneven", 2, 13, 18, 3, 4, 4, 117, 12),
    case("sx2_sy3", 2, 9, 8, 5, 2, 3, 36, 13),
    case("sx3_sy2", 2, 8, 9, 5, 3, 2, 36, 14),
    case("sx1_sy2", 2, 8, 6, 5, 1, 2, 20, 15),
    case("sx2_sy1", 2, 6, 8, 5, 2, 1, 20, 16),
    case("sx1_sy1_no_src", 2, 3, 4, 5, 1, 1, 6, 17),
    case("batch_1", 1, 8, 8, 5, 2, 2, 32, 18),
    case("batch_3", 3, 8, 8, 5, 2, 2, 32, 19),
    case("distinct_dims_2_7_11_3_5", 2, 7, 11, 13, 3, 5, 41, 20),
    case("distinct_dims_3_11_5_2_7", 3, 11, 5, 7, 2, 3, 23, 21),
    case("r_0", 2, 8, 8, 5, 2, 2, 0, 22),
    case("r_1", 2, 8, 8, 5, 2, 2, 1, 23),
    case("r_all_src", 2, 8, 8, 5, 2, 2, 48, 24),  # int(64 * .75): the ratio exactly 1 - 1/(sx*sy)
    case("r_all_src_uneven", 2, 5, 7, 5, 2, 2, 29, 25),  # 35 tokens, 6 dst
    case("r_more_than_src", 2, 6, 6, 5, 2, 2, 36, 26),  # silently capped at 27
    case("many_src_one_dst", 2, 8, 8, 6, 2, 2, 44, 27, CLUSTERS),
    case("many_src_one_dst_uneven", 2, 9, 11, 6, 4, 3, 80, 28, CLUSTERS),
    case("ties", 2, 8, 8, 5, 2, 2, 32, 29, TIES),  # which tokens merge is unspecified: only the count is recorded
]


def dst_mask(h, w, sx, sy):
    """[h*w] bool: the top left token of every complete sx × sy cell."""
    mask = np.zeros((h, w), bool)
    mask[: h // sy * sy : sy, : w // sx * sx : sx] = True
    return mask.reshape(-1)


def draw(c):
    """The tokens of a case, [B, N, C] float32."""
    rng = np.random.RandomState(c["seed"])
    x = rng.standard_normal((c["B"], c["h"] * c["w"], c["C"]))
    if c["data"] == CLUSTERS:  # three dst tokens attract every src token, which is a scaled, slightly noisy copy
        is_dst = dst_mask(c["h"], c["w"], c["sx"], c["sy"])
        leaders = x[:, np.flatnonzero(is_dst)[[0, 2, 3]]]
        which, scale = rng.randint(3, size=x.shape[1]), rng.uniform(0.5, 2, (x.shape[1], 1))
        x = np.where(is_dst[:, None], x, leaders[:, which] * scale + 0.02 * x)
    if c["data"] == TIES:  # three different tokens, repeated
        x = x[:, rng.randint(3, size=x.shape[1])]
    return x.astype(np.float32)


def margins(x, c):
    """Margins of the two decisions, in float64: (best over second-best dst, edge r over edge r + 1)."""
    is_dst = dst_mask(c["h"], c["w"], c["sx"], c["sy"])
    unit = x.astype(np.float64)
    unit /= np.linalg.norm(unit, axis=-1, keepdims=True)
    scores = unit[:, ~is_dst] @ unit[:, is_dst].transpose(0, 2, 1)
    edges = -np.sort(-scores.max(-1), axis=-1) if scores.size else np.zeros((len(x), 0))
    r = min(c["r"], edges.shape[1])
    lead = np.sort(scores, axis=-1)[..., -2:]
    return (
        float((lead[..., 1] - lead[..., 0]).min()) if r and lead.shape[-1] == 2 else np.inf,
        float((edges[:, r - 1] - edges[:, r]).min()) if 0 < r < edges.shape[1] else np.inf,
    )


def groups(merge, unmerge, c):
    """[B, N] int32: the dst token each token was merged into, or the token itself."""
    b, n = c["B"], c["h"] * c["w"]
    members = unmerge(merge(torch.eye(n).expand(b, n, n).contiguous())).numpy() > 0
    is_dst = dst_mask(c["h"], c["w"], c["sx"], c["sy"])
    group = np.tile(np.arange(n, dtype=np.int32), (b, 1))
    for i, j in zip(*np.nonzero(members.sum(-1) > 1), strict=True):
        (group[i, j],) = np.flatnonzero(members[i, j] & is_dst)
    return group


def record(c):
    """Run one case; returns its entry in the index and the arrays to store."""
    x = draw(c)
    n = x.shape[1]
    merge, unmerge = bipartite_soft_matching_random2d(
        torch.from_numpy(x), c["w"], c["h"], c["sx"], c["sy"], c["r"], no_rand=True
    )
    merged = merge(torch.from_numpy(x))
    entry = {**c, "kept": merged.shape[1], "tie": c["data"] == TIES}
    arrays = {} if c["data"] == NORMAL else {"x": x}
    if c["data"] == TIES:
        return entry, arrays
    lead, edge = margins(x, c)
    if min(lead, edge) < MARGIN:
        raise SystemExit(f"{c['name']}: too close to a tie ({lead:.1e}, {edge:.1e}); choose another seed")
    out = unmerge(merged).numpy()
    group = groups(merge, unmerge, c)
    dsts = int(dst_mask(c["h"], c["w"], c["sx"], c["sy"]).sum())

    # the two records must agree: a token's output is the mean of its group
    for b in range(len(x)):
        for leader in np.unique(group[b]):
            inside = group[b] == leader
            np.testing.assert_allclose(out[b, inside], np.tile(x[b, inside].mean(0), (inside.sum(), 1)), atol=2e-6)
        assert len(np.unique(group[b])) == entry["kept"] == max(n - c["r"], dsts)
    return entry, {**arrays, "roundtrip": out, "group": group}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("merge.npz"))
    out = parser.parse_args().output
    torch.set_num_threads(1)
    index, arrays = [], {}
    for c in CASES:
        entry, recorded = record(c)
        index.append(entry)
        arrays.update({f"{c['name']}/{k}": v for k, v in recorded.items()})
    made_with = {p: version(p) for p in ("tomesd", "torch", "numpy")} | {"python": platform.python_version()}
    np.savez_compressed(out, cases=json.dumps(index), made_with=json.dumps(made_with), **arrays)
    print(f"{len(index)} cases, {out.stat().st_size / 1e3:.0f} kB, {made_with}")


if __name__ == "__main__":
    main()
