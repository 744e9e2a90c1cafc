"""The time of one transformer block at its real width, plain and merged, with random weights: FLUX, Wan and SD3.5.

    PPDIFFUSERS_SOURCE=DIR OMP_NUM_THREADS=1 python benchmarks/flux_blocks.py [--blocks NAME …] [--output FILE]

DIR contains a package ppdiffusers that has their classes, which 0.29.0 has not. Batch 1, float32; models of one block,
with embeddings and output, which take little of the time:

- joint, single-stream: FLUX at 1024 px, 4,096 image tokens and 512 of text
- Wan: the 1.3B model at 480p (832×480 px), but only 5 latent frames (17 frames) of 30×52 tokens, 7,800 in all: the
  scores of the usual 21, 32,760 tokens, take 52 GB in Paddle's attention on CPUs
- SD3.5: medium at 1024 px, a block with two attentions, 4,096 image tokens and 333 of text; as the model's last block
  it has no output for the text

All arms use Paddle's `scaled_dot_product_attention`. They take turns; speed-ups are medians of the ratios within a
round. MACs are those of the whole model, with matching.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, os.environ.get("PPDIFFUSERS_SOURCE", "."))

import paddle
import paddle.nn.functional as F
import ppdiffusers
from paddle import nn

import ppdiffusers_tome
from ppdiffusers_tome import ToMeConfig
from ppdiffusers_tome.evaluation.clock import ratio_within_rounds, time_in_turns
from ppdiffusers_tome.evaluation.results import make_result, write_result

ARMS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "merged": {"ratio": 0.5},
    "merged_mlp": {"ratio": 0.5, "merge_mlp": True},  # in the blocks whose MLP comes after attention
    "alone": {"ratio": 0.5, "merge_attn": "alone"},  # in a single-stream block
    "kv": {"ratio": 0.75, "merge_attn": "kv"},
}
TEXT_CHANNELS = 4096


def flux(**layers: int) -> tuple[nn.Layer, dict[str, Any]]:
    """A model of FLUX with so many `num_layers` and `num_single_layers`, and the arguments of a pass."""
    side = 64
    rows, columns = (axis.flatten() for axis in paddle.meshgrid(paddle.arange(side), paddle.arange(side)))
    return ppdiffusers.FluxTransformer2DModel(**layers), {
        "hidden_states": paddle.randn([1, side**2, 64]),
        "encoder_hidden_states": paddle.randn([1, 512, TEXT_CHANNELS]),
        "pooled_projections": paddle.randn([1, 768]),
        "timestep": paddle.full([1], 0.5),
        "img_ids": paddle.stack([paddle.zeros_like(rows), rows, columns], axis=1).cast("float32"),
        "txt_ids": paddle.zeros([512, 3]),
    }


def wan(frames: int = 5) -> tuple[nn.Layer, dict[str, Any]]:
    """One block of Wan 1.3B, and the arguments of a pass."""
    model = ppdiffusers.WanTransformer3DModel(num_attention_heads=12, ffn_dim=8960, num_layers=1)
    return model, {
        "hidden_states": paddle.randn([1, 16, frames, 60, 104]),
        "timestep": paddle.full([1], 500),
        "encoder_hidden_states": paddle.randn([1, 512, TEXT_CHANNELS]),
    }


def sd35() -> tuple[nn.Layer, dict[str, Any]]:
    """One block of Stable Diffusion 3.5 medium, and the arguments of a pass."""
    model = ppdiffusers.SD3Transformer2DModel(
        num_layers=1,
        num_attention_heads=24,
        joint_attention_dim=TEXT_CHANNELS,
        caption_projection_dim=1536,
        pos_embed_max_size=384,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    return model, {
        "hidden_states": paddle.randn([1, 16, 128, 128]),
        "encoder_hidden_states": paddle.randn([1, 77 + 256, TEXT_CHANNELS]),
        "pooled_projections": paddle.randn([1, 2048]),
        "timestep": paddle.full([1], 500),
    }


# The model, the height and width of its latents, and its latent frames.
BLOCKS: dict[str, tuple[Callable[[], tuple[nn.Layer, dict[str, Any]]], int, int, int | None]] = {
    "joint": (partial(flux, num_layers=1, num_single_layers=0), 64, 64, None),
    "single-stream": (partial(flux, num_layers=0, num_single_layers=1), 64, 64, None),
    "Wan": (wan, 60, 104, 5),
    "SD3.5": (sd35, 128, 128, None),
}


def measure(block: str, rounds: int) -> list[dict]:
    """A row for each arm."""
    make, h, w, frames = BLOCKS[block]
    paddle.seed(0)
    model, inputs = make()
    model.eval()

    def merge(settings: dict | None) -> None:
        if settings is None:
            ppdiffusers_tome.remove_tome(model)
        else:
            ppdiffusers_tome.apply_tome(model, config=ToMeConfig(**settings))

    def run(settings: dict | None) -> None:
        merge(settings)
        with paddle.no_grad():
            model(**inputs)

    other = "merged_mlp" if block == "single-stream" else "alone"  # where it is the same as another arm
    arms = {arm: settings for arm, settings in ARMS.items() if arm != other}
    seconds = time_in_turns({arm: partial(run, settings) for arm, settings in arms.items()}, rounds, warm_up=1)
    rows = []
    for arm, own in seconds.items():
        merge(arms[arm])
        summary = ppdiffusers_tome.tome_summary(model, h, w, frames=frames)
        speed_up = ratio_within_rounds(seconds["plain"], own).median
        assert summary.saved_share is not None
        allowed = 1 / (1 - summary.saved_share)
        rows.append({"block": block, "arm": arm, "seconds": own, "speed_up": speed_up, "allowed_by_macs": allowed})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", nargs="+", choices=BLOCKS, default=list(BLOCKS), help="default: all")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--output", type=Path, help="JSON file for the result")
    options = parser.parse_args()
    # ppdiffusers' own calls CUDA kernels.
    F.scaled_dot_product_attention_ = lambda query, key, value, attn_mask=None, **_: F.scaled_dot_product_attention(
        query, key, value, attn_mask
    )
    rows = [row for block in options.blocks for row in measure(block, options.rounds)]
    for row in rows:
        print(
            f"{row['block']:14} {row['arm']:10} {row['speed_up']:.2f}× (MACs allow {row['allowed_by_macs']:.2f}×), "
            f"s: {', '.join(f'{seconds:.2f}' for seconds in row['seconds'])}"
        )
    if options.output:
        command = shlex.join(["python", "benchmarks/flux_blocks.py", *sys.argv[1:]])
        source = ppdiffusers.__version__
        write_result(options.output, make_result("experiments", command, ppdiffusers_source=source, rows=rows))


if __name__ == "__main__":
    main()
