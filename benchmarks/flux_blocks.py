"""The time of one joint and one single-stream block of FLUX at its real width, plain and merged, with random weights.

    PPDIFFUSERS_SOURCE=DIR OMP_NUM_THREADS=1 python benchmarks/flux_blocks.py [--output FILE]

DIR contains the package ppdiffusers with `FluxTransformer2DModel`, which 0.29.0 does not have. 4,096 image tokens
(1024 px) and 512 text tokens, batch 1, float32. The arms take turns; speed-ups are medians of the ratios within a
round. MACs are those of linear layers and attention.
"""

import argparse
import os
import shlex
import sys
from pathlib import Path

sys.path.insert(0, os.environ.get("PPDIFFUSERS_SOURCE", "."))

import paddle

import ppdiffusers_tome
from ppdiffusers_tome.evaluation.clock import ratio_within_rounds, time_in_turns
from ppdiffusers_tome.evaluation.results import make_result, write_result

WIDTH, HEADS, TEXT, SIDE = 3072, 24, 512, 64
ARMS = {
    "plain": None,
    "merged": {"ratio": 0.5},
    "merged_mlp": {"ratio": 0.5, "merge_mlp": True},  # in the joint block too
    "kv": {"ratio": 0.75, "merge_attn": "kv"},
}


def macs(kind: str, arm: str) -> float:
    """MACs of a block, without its norms' projections of the timestep."""
    image = SIDE**2
    kept = {"plain": image, "kv": image // 4}.get(arm, image // 2)
    queries = image if arm in ("plain", "kv") else kept
    projections = (2 * queries + 2 * kept + 4 * TEXT) * WIDTH**2  # queries and output, keys and values
    attention = 2 * (queries + TEXT) * (kept + TEXT) * WIDTH
    if kind == "single-stream":  # attention has no output of its own; both go through one projection of five widths
        mlp = (queries + TEXT) * (4 + 5) * WIDTH**2
        return projections - (queries + TEXT) * WIDTH**2 + attention + mlp
    mlp = ((kept if arm == "merged_mlp" else image) + TEXT) * 8 * WIDTH**2
    return projections + attention + mlp


def measure(kind: str, rounds: int) -> list[dict]:
    """A row for each arm."""
    from ppdiffusers import FluxTransformer2DModel

    count = {"num_layers": int(kind == "joint"), "num_single_layers": int(kind != "joint")}
    paddle.seed(0)
    model = FluxTransformer2DModel(**count)
    model.eval()
    rows, columns = (axis.flatten() for axis in paddle.meshgrid(paddle.arange(SIDE), paddle.arange(SIDE)))
    inputs = {
        "hidden_states": paddle.randn([1, SIDE**2, 64]),
        "encoder_hidden_states": paddle.randn([1, TEXT, 4096]),
        "pooled_projections": paddle.randn([1, 768]),
        "timestep": paddle.full([1], 0.5),
        "img_ids": paddle.stack([paddle.zeros_like(rows), rows, columns], axis=1).cast("float32"),
        "txt_ids": paddle.zeros([TEXT, 3]),
    }

    def run(settings: dict | None) -> None:
        if settings is None:
            ppdiffusers_tome.remove_tome(model)
        else:
            ppdiffusers_tome.apply_tome(model, **settings)
        with paddle.no_grad():
            model(**inputs)

    arms = {arm: lambda settings=settings: run(settings) for arm, settings in ARMS.items()}
    seconds = time_in_turns(arms, rounds, warm_up=1)
    plain = macs(kind, "plain")
    return [
        {
            "block": kind,
            "arm": arm,
            "seconds": own,
            "speed_up": ratio_within_rounds(seconds["plain"], own).median,
            "allowed_by_macs": plain / macs(kind, arm),
        }
        for arm, own in seconds.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--output", type=Path, help="JSON file for the result")
    options = parser.parse_args()
    rows = [row for kind in ("joint", "single-stream") for row in measure(kind, options.rounds)]
    for row in rows:
        print(
            f"{row['block']:14} {row['arm']:10} {row['speed_up']:.2f}× (MACs allow {row['allowed_by_macs']:.2f}×), "
            f"s: {', '.join(f'{seconds:.2f}' for seconds in row['seconds'])}"
        )
    if options.output:
        command = shlex.join(["python", "benchmarks/flux_blocks.py", *sys.argv[1:]])
        write_result(options.output, make_result("experiments", command, rows=rows))


if __name__ == "__main__":
    main()
