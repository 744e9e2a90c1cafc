"""`bench`: time things."""

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ToMeConfigError
from ..evaluation.benchmark import OpsCase, format_ops, time_ops
from ..evaluation.inference import measure_all
from ..evaluation.inference_cases import Measurement, cases
from ..evaluation.inference_report import format_inference
from ..evaluation.torch_arm import why_not


def add(commands: argparse._SubParsersAction) -> None:
    """Add `bench` and what it times to the command line."""
    bench = commands.add_parser("bench", help="time things").add_subparsers(dest="what", required=True)
    ops = bench.add_parser(
        "ops",
        help="merge, unmerge and plan against the functions that ppdiffusers ships",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for field, default in vars(OpsCase()).items():
        ops.add_argument(f"--{field}", type=type(default), default=default)
    ops.add_argument("--repeats", type=int, default=20, help="timed rounds")
    ops.add_argument("--output", type=Path, help="write the result, with machine and versions, to this JSON file")
    ops.set_defaults(run=_ops)
    inference = bench.add_parser(
        "inference",
        help="a UNet's pass: eager, Paddle Inference, PyTorch + tomesd; plain, merged and at the free-merge limit",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    inference.add_argument("--cases", nargs="+", help="some of tiny, emoji-32, emoji-64, sd15-top-64", default=None)
    inference.add_argument("--quick", action="store_true", help="the tiny case in 3 rounds: shows that all works")
    inference.add_argument("--model", type=Path, default=Path("examples/emoji_sd"), help="the bundled model's folder")
    inference.add_argument("--ratio", type=float, default=0.5, help="share of tokens to merge")
    inference.add_argument("--rounds", type=int, default=9, help="timed rounds")
    inference.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of every arm")
    inference.add_argument(
        "--torch-python", help="interpreter that has torch, diffusers and tomesd; else not measured"
    )
    inference.add_argument("--json", type=Path, help="write the result, with machine and versions, to this file")
    inference.set_defaults(run=_inference)


def _ops(options: argparse.Namespace, given: Sequence[str]) -> int:
    case = OpsCase(options.batch, options.height, options.width, options.channels, options.ratio)
    result = {"command": shlex.join(["python", "-m", "ppdiffusers_tome", *given]), **time_ops(case, options.repeats)}
    print(format_ops(result))
    _write(options.output, result)
    return 0


def _inference(options: argparse.Namespace, given: Sequence[str]) -> int:
    if options.threads >= 1 and os.environ.get("OMP_NUM_THREADS") != str(options.threads):
        # Eager Paddle reads it once, when it is imported, and that has happened.
        again = [sys.executable, "-W", "ignore", "-m", "ppdiffusers_tome", *given]
        return subprocess.run(again, env={**os.environ, "OMP_NUM_THREADS": str(options.threads)}).returncode
    known = cases(options.model)
    names = options.cases or (["tiny"] if options.quick else [name for name in known if name != "tiny"])
    if unknown := [name for name in names if name not in known]:
        raise ToMeConfigError(f"--cases {unknown[0]} is not allowed: it must be some of {', '.join(known)}.")
    if options.torch_python and (reason := why_not(options.torch_python)):
        raise ToMeConfigError(f"--torch-python {options.torch_python} is of no use: {reason}")
    rounds = 3 if options.quick else options.rounds
    how = Measurement(options.ratio, rounds, options.threads, options.torch_python or sys.executable)
    command = shlex.join(["python", "-m", "ppdiffusers_tome", *given])
    result = {"command": command, "commit": _commit(), **measure_all([known[name] for name in names], how)}
    print(format_inference(result))
    _write(options.json, result)
    return 0


def _commit() -> str:
    """The checkout's commit, with "+" where tracked files of the package differ from it; "none" outside of one."""
    package = Path(__file__).parents[1]
    found: list[str] = []
    for question in ("rev-parse --short HEAD", "status --porcelain -uno -- ."):
        try:
            done = subprocess.run(["git", *question.split()], cwd=package, capture_output=True, text=True)
        except OSError:
            return "none"
        if done.returncode:
            return "none"
        found.append(done.stdout.strip())
    return found[0] + ("+" if found[1] else "")


def _write(path: Path | None, result: dict[str, Any]) -> None:
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
