"""The time of one transformer block of SDXL's UNet at its real width, plain and merged, with random weights.

    OMP_NUM_THREADS=1 python benchmarks/sdxl_blocks.py [--output FILE]

The whole UNet, 2.6 billion parameters, is too large to export in 24 GB of memory. Ten of its 70 blocks are at level 2,
which merges, and 60 at level 4, which `max_downsample=4` merges too. Each block is exported as ONNX with
the layers around it (norm and projections), and runs in ONNX Runtime at batch 2, which is one image with guidance.
The arms of a block take turns. The result is one of `bench`, which `bench report` reads.
"""

import argparse
import copy
import shlex
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import paddle
from lab.arm import Arm
from lab.result_files import make_result
from lab.speed.architectures import ARCHITECTURES
from lab.speed.cases import MEASURED, ONNX_RUNTIME, Case, Measurement
from lab.timing import time_in_turns
from top_block import OneBlock, build_transformer

from ppdiffusers_tome import ToMeConfig
from ppdiffusers_tome.attach.attach import attach
from ppdiffusers_tome.comparison.clock import gain
from ppdiffusers_tome.comparison.environment import describe_environment
from ppdiffusers_tome.comparison.option_defaults import ROUNDS
from ppdiffusers_tome.comparison.results import write_result
from ppdiffusers_tome.export import tracing
from ppdiffusers_tome.export.conversion import Converter
from ppdiffusers_tome.export.programs import Input, Traceable
from ppdiffusers_tome.grid import Grid
from ppdiffusers_tome.run.onnx_runtime import OnnxProgram, OnnxRuntime

SDXL = ARCHITECTURES["sdxl"]
BLOCKS = ((2, 1024), (4, 1024), (4, 2048))  # level, and the side of the image in px
CONFIGS = (ToMeConfig(0.5), ToMeConfig(0.75))
BATCH = 2


def measure(level: int, size: int, rounds: int, threads: int) -> Case:
    """Time the arms of a block at a level."""
    latent = SDXL.latent(size)
    grid = Grid(latent.h // level, latent.w // level)
    stage = level.bit_length() - 1
    paddle.seed(0)
    block = OneBlock(build_transformer(SDXL, stage))
    block.eval()
    text = (BATCH, SDXL.text, SDXL.config["cross_attention_dim"])
    shape = (BATCH, SDXL.config["block_out_channels"][stage], *grid)
    case = Case("sdxl", f"one block at level {level}", size, batch=BATCH, latent=[*latent], tokens=grid.tokens)
    inputs = {"sample": paddle.randn(shape), "encoder_hidden_states": paddle.randn(text)}
    inputs["timestep"] = paddle.to_tensor([500.0])
    with tempfile.TemporaryDirectory() as folder, Converter() as converter:
        run: dict[Arm, Callable[[], object]] = {}
        for config in (None, *CONFIGS):
            layer = copy.deepcopy(block)
            if config is not None:
                attach(layer, config, None)
            arm = Arm(config, backend=ONNX_RUNTIME)
            case.arms.append(Measurement(arm))
            program = load(layer, grid, Path(folder) / f"{len(run)}", threads, converter)
            run[arm] = partial(program, **inputs)
        seconds = time_in_turns(run, rounds, warm_up=2)
    for measured in case.arms:
        measured.seconds, measured.status = seconds[measured.arm], MEASURED
    return case


def load(layer: OneBlock, grid: Grid, folder: Path, threads: int, converter: Converter) -> OnnxProgram:
    """The exported program of a block, as a function of its inputs by name."""
    config = layer.transformer.config
    sample = Input("sample", ("batch", config.in_channels, "height", "width"))
    text = Input("encoder_hidden_states", ("batch", SDXL.text, config.cross_attention_dim))
    traceable = Traceable(layer, (sample, text, Input("timestep", (1,))))
    files = tracing.write_program(traceable, folder, {"height": grid.h, "width": grid.w}, "block")
    return OnnxProgram(converter.convert(*files, "block"), OnnxRuntime(threads=threads))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="JSON file for the result")
    options = parser.parse_args()
    cases = [measure(level, size, options.rounds, options.threads) for level, size in BLOCKS]
    for case in cases:
        plain = case.arms[0]
        for merged in case.arms[1:]:
            seconds = f"{np.median(plain.seconds):.3f} → {np.median(merged.seconds):.3f} s"
            gained = gain(plain.seconds, merged.seconds)
            print(f"{case.scope}, {case.size} px: {merged.name}: {seconds}, {gained}")
    if options.output:
        command = shlex.join(["python", "benchmarks/sdxl_blocks.py", *sys.argv[1:]])
        timing = {"rounds": options.rounds, "warm_up": 2, "threads": options.threads}
        content = {"environment": describe_environment(), **timing, "cases": [case.to_json() for case in cases]}
        write_result(options.output, make_result("speed", command, **content))


if __name__ == "__main__":
    main()
