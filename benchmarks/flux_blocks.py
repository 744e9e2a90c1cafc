"""The time of one transformer block at its real width, plain and merged, with random weights: FLUX, Wan and SD3.5.

    PPDIFFUSERS_SOURCE=DIR OMP_NUM_THREADS=1 python benchmarks/flux_blocks.py [--blocks NAME …] [--output FILE]

DIR contains a package ppdiffusers that has their classes, which 0.29.0 has not. Batch 1, float32; models of one block,
with embeddings and output, which take little of the time:

- joint, single-stream: FLUX at 1024 px, 4,096 image tokens and 512 of text
- Wan: the 1.3B model at 480p (832×480 px), but only 5 latent frames (17 frames) of 30×52 tokens, 7,800 in all: the
  scores of the usual 21, 32,760 tokens, take 52 GB in Paddle's attention on CPUs
- SD3.5: medium at 1024 px, a block with two attentions, 4,096 image tokens and 333 of text; as the model's last block
  it has no output for the text

All arms use Paddle's `scaled_dot_product_attention`, and take turns. MACs are those of the whole model, with matching.
The result is one of `bench`, which `bench report` reads.
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
from lab.arm import Arm
from lab.result_files import make_result
from lab.speed.cases import MEASURED, Case, Measurement
from lab.timing import time_in_turns
from paddle import nn

import ppdiffusers_tome
from ppdiffusers_tome import ToMeConfig
from ppdiffusers_tome.comparison.clock import gain
from ppdiffusers_tome.comparison.environment import describe_environment
from ppdiffusers_tome.comparison.option_defaults import ROUNDS
from ppdiffusers_tome.comparison.results import write_result
from ppdiffusers_tome.families.blocks import find_blocks
from ppdiffusers_tome.grid import Grid

CONFIG = ToMeConfig(0.75)
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


# The function, the latents and latent frames of its model; and how the report names model, block and size in px.
BLOCKS: dict[str, tuple[Callable[[], tuple[nn.Layer, dict[str, Any]]], Grid, int, str, str, int]] = {
    "joint": (partial(flux, num_layers=1, num_single_layers=0), Grid(64, 64), 1, "FLUX", "one joint block", 1024),
    "single-stream": (
        partial(flux, num_layers=0, num_single_layers=1), Grid(64, 64), 1, "FLUX", "one single-stream block", 1024,
    ),
    "Wan": (wan, Grid(60, 104), 5, "Wan 2.1 1.3B", "one block over 5 latent frames", 480),
    "SD3.5": (sd35, Grid(128, 128), 1, "Stable Diffusion 3.5 medium", "one block with two attentions", 1024),
}  # fmt: skip


def plan(block: str) -> tuple[Case, nn.Layer, dict[str, Any]]:
    """The case to measure, with tokens and MACs; the model; and the arguments of its pass."""
    make, latent, frames, name, scope, size = BLOCKS[block]
    paddle.seed(0)
    model, inputs = make()
    model.eval()
    tokens = find_blocks(model)[0].grid(latent).tokens
    case = Case(name, scope, size, batch=1, latent=list(latent), tokens=tokens)
    for config in (None, CONFIG):
        set_merging(model, config)
        summary = ppdiffusers_tome.tome_summary(model, *latent, frames=frames)
        assert summary.macs is not None and summary.saved is not None
        case.arms.append(Measurement(Arm(config), macs=summary.macs - summary.saved))
    return case, model, inputs


def set_merging(model: nn.Layer, config: ToMeConfig | None) -> None:
    if config is None:
        ppdiffusers_tome.remove_tome(model)
    else:
        ppdiffusers_tome.apply_tome(model, config=config)


def measure(block: str, rounds: int) -> Case:
    """Time the arms of a block."""
    case, model, inputs = plan(block)

    def run(arm: Arm) -> None:
        set_merging(model, arm.config)
        with paddle.no_grad():
            model(**inputs)

    seconds = time_in_turns({measured.arm: partial(run, measured.arm) for measured in case.arms}, rounds, warm_up=1)
    for measured in case.arms:
        measured.seconds, measured.status = seconds[measured.arm], MEASURED
    return case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", nargs="+", choices=BLOCKS, default=list(BLOCKS), help="default: all")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default: %(default)s")
    parser.add_argument("--output", type=Path, help="JSON file for the result")
    options = parser.parse_args()
    # ppdiffusers' own calls CUDA kernels.
    F.scaled_dot_product_attention_ = lambda query, key, value, attn_mask=None, **_: F.scaled_dot_product_attention(
        query, key, value, attn_mask
    )
    cases = [measure(block, options.rounds) for block in options.blocks]
    for case in cases:
        plain, merged = case.arms
        allowed = f"MACs allow {plain.macs / merged.macs:.2f}×"
        print(f"{case.name}: {merged.name}: {gain(plain.seconds, merged.seconds)}, {allowed}")
    if options.output:
        command = shlex.join(["python", "benchmarks/flux_blocks.py", *sys.argv[1:]])
        about = {**describe_environment(), "ppdiffusers": ppdiffusers.__version__}
        timing = {"rounds": options.rounds, "warm_up": 1, "threads": int(os.environ.get("OMP_NUM_THREADS", "1"))}
        content = {"environment": about, **timing, "cases": [case.to_json() for case in cases]}
        write_result(options.output, make_result("speed", command, **content))


if __name__ == "__main__":
    main()
