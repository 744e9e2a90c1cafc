"""Time the operations of token merging, by each kind of matching and by the functions of ppdiffusers, in turns.

python benchmarks/ops.py --output benchmarks/results           # ops.json, and ops.md beside the folder
python benchmarks/ops.py report --output benchmarks/results    # ops.md from ops.json
"""

import argparse
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import paddle
from lab import markdown
from lab.markdown import table
from ppdiffusers.patches.tomesd_patch_utils import bipartite_soft_matching_random2d

from ppdiffusers_tome import ToMeConfig, ToMeError
from ppdiffusers_tome.attach.placement import tokens_kept
from ppdiffusers_tome.comparison.clock import gain, quartiles, time_in_turns
from ppdiffusers_tome.comparison.results import check_result, make_result, read_json, write_result
from ppdiffusers_tome.grid import Grid
from ppdiffusers_tome.methods import METHODS
from ppdiffusers_tome.methods.plan import MergePlan, merge, unmerge

WINDOWS = (None, 8, 16)
GLOBAL, BUILT_IN = "symmetric, window=None", "tomesd (built-in)"  # over the whole grid: ours, and that of ppdiffusers
OPERATIONS = ("plan", "merge", "unmerge", "merge + unmerge")
CASE = {"batch": 2, "height": 64, "width": 64, "channels": 320, "ratio": 0.5}
SIDES = (64, 96, 128, 256, 512)  # tokens along each side of a grid: images of 512 to 4096 px in Stable Diffusion
FORMAT_BEFORE = 3  # of results that have medians alone, and these names
NAMES_BEFORE = {
    "global": GLOBAL,
    "windows of 8": "symmetric, window=8",
    "windows of 16": "symmetric, window=16",
    "built-in": BUILT_IN,
}
TOLERANCE = 1e-5  # float32 means of a few tokens of size 1


def make_configs(ratio: float) -> dict[str, ToMeConfig]:
    """The config of each kind of matching."""
    return {
        f"symmetric, window={window}": ToMeConfig(ratio, "symmetric", window=window, use_rand=False)
        for window in WINDOWS
    }


def planner(x: paddle.Tensor, grid: Grid, config: ToMeConfig) -> Callable[[], MergePlan]:
    """A function that makes the plan of a config for tokens [B, N, C]. Models build a grid's constants once too."""
    method, kept = METHODS[config.method], tokens_kept(config, grid)
    return partial(method.plan, x, method.constants(grid, config, kept, 0), kept)


def time_operations(case: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Time plan, merge and unmerge of every kind of matching, after checking that the global one equals the built-in.

    Returns:
        `case`, `rounds`, `difference` (the largest, absolute), and `methods`, the built-in last: each with its
        `method` and the `milliseconds` of each operation in each round; "merge + unmerge" adds the two in each round.

    Raises:
        ToMeError: the two differ.
    """
    grid, configs = Grid(case["height"], case["width"]), make_configs(case["ratio"])
    x = paddle.randn([case["batch"], grid.tokens, case["channels"]])
    removed = grid.tokens - tokens_kept(configs[GLOBAL], grid).queries

    def plan_built_in() -> tuple[Callable[..., Any], ...]:
        return bipartite_soft_matching_random2d(x, grid.w, grid.h, 2, 2, removed, no_rand=True)

    built_in_merge, built_in_unmerge = plan_built_in()
    arms: dict[tuple[str, str], Callable[[], Any]] = {
        (BUILT_IN, "plan"): plan_built_in,
        (BUILT_IN, "merge"): partial(built_in_merge, x),
        (BUILT_IN, "unmerge"): partial(built_in_unmerge, built_in_merge(x)),
    }
    for name, config in configs.items():
        arms[name, "plan"] = planner(x, grid, config)
        plan = arms[name, "plan"]()
        arms[name, "merge"] = partial(merge, x, plan)
        arms[name, "unmerge"] = partial(unmerge, arms[name, "merge"](), plan)
    difference = float((arms[GLOBAL, "unmerge"]() - arms[BUILT_IN, "unmerge"]()).abs().max())
    if difference > TOLERANCE:
        raise ToMeError(f"ours and the built-in functions differ by {difference:g} on {case}: they are not timed.")
    seconds = time_in_turns(arms, rounds, warm_up=3)
    methods = []
    for name in (*configs, BUILT_IN):
        milliseconds = {}
        for operation in OPERATIONS:
            parts = zip(*(seconds[name, part] for part in operation.split(" + ")), strict=True)
            milliseconds[operation] = [1e3 * sum(of_round) for of_round in parts]
        methods.append({"method": name, "milliseconds": milliseconds})
    return {"case": case, "rounds": rounds, "difference": difference, "methods": methods}


def time_growth(case: dict[str, Any], sides: list[int], rounds: int, limit: float) -> dict[str, Any]:
    """Time the plan of each method for one image on square grids, except where its scores need more than `limit` GB.

    Returns:
        `channels`, `rounds`, `limit_gb` and `plans`, each with `method`, `side`, `scores_gb` (in float32) and
        `milliseconds` (the median; None if it was not timed).
    """
    plans = []
    configs = make_configs(case["ratio"])
    for side in sides:
        grid = Grid(side, side)
        x = paddle.randn([1, grid.tokens, case["channels"]])
        scores = {name: 4e-9 * METHODS[config.method].pairs_compared(grid, config) for name, config in configs.items()}
        timed = {name: planner(x, grid, configs[name]) for name in configs if scores[name] <= limit}
        seconds = time_in_turns(timed, rounds, warm_up=1)
        medians = {name: 1e3 * quartiles(seconds[name]).median for name in seconds}
        plans += [
            {"method": name, "side": side, "scores_gb": gigabytes, "milliseconds": medians.get(name)}
            for name, gigabytes in scores.items()
        ]
    return {"channels": case["channels"], "rounds": rounds, "limit_gb": limit, "plans": plans}


def write_page(results: Path) -> str:
    """Write ops.md, beside the folder of results, from the ops.json there; returns its text."""
    file = results / "ops.json"
    result = read_json(file)
    check_result(result, "operations", file, earlier=[FORMAT_BEFORE])
    if result["format"] == FORMAT_BEFORE:
        for row in result["methods"]:
            row["milliseconds"] = {name: [median] for name, median in row["milliseconds"].items()}
        for row in (*result["methods"], *result["growth"]["plans"]):
            row["method"] = NAMES_BEFORE[row["method"]]
    *_, built_in = result["methods"]
    plans = {(plan["method"], plan["side"]): plan for plan in result["growth"]["plans"]}
    methods, sides = (list(dict.fromkeys(key[nth] for key in plans)) for nth in (0, 1))
    rows = [[f"{side}×{side}", *(_growth_cell(plans[method, side]) for method in methods)] for side in sides]
    return markdown.write_page(
        Path(__file__).with_name("templates") / "ops.md",
        results.parent,
        file=file,
        **result,
        operations=table(
            ["method", *OPERATIONS], [[row["method"], *_cells(row, built_in)] for row in result["methods"]]
        ),
        plans=table(["tokens", *methods], rows),
    )


def _cells(row: dict[str, Any], built_in: dict[str, Any]) -> list[str]:
    """The median of each operation, and the gain over the built-in."""
    cells = []
    for name in OPERATIONS:
        own, other = (one["milliseconds"][name] for one in (row, built_in))
        cells.append(f"{quartiles(own).median:.2f}" + ("" if row is built_in else f" ({gain(other, own)})"))
    return cells


def _growth_cell(plan: dict[str, Any]) -> str:
    milliseconds = plan["milliseconds"]
    if milliseconds is None:
        return f"does not fit: {plan['scores_gb']:.3g} GB"
    return f"{milliseconds:.2f} ({1e3 * milliseconds / plan['side'] ** 2:.3f})"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["report"], help="only write the page of a result")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--growth", type=int, nargs="*", default=list(SIDES), metavar="SIDE", help="tokens per side")
    parser.add_argument("--memory-limit", type=float, default=2, metavar="GB", help="for the scores of one plan")
    parser.add_argument("--output", type=Path, default=Path("outputs"), metavar="DIR")
    options = parser.parse_args(arguments)
    if options.what is None:
        result = time_operations(CASE, options.rounds)
        result["growth"] = time_growth(CASE, options.growth, min(options.rounds, 5), options.memory_limit)
        command = shlex.join(["python", "benchmarks/ops.py", *arguments])
        write_result(options.output / "ops.json", make_result("operations", command, **result))
    print(write_page(options.output))


if __name__ == "__main__":
    main(sys.argv[1:])
