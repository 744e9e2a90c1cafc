"""Time a UNet's pass in Paddle's eager mode, in Paddle Inference and in PyTorch, plain and merged, taking turns."""

import random
import resource
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import paddle
from tqdm.auto import tqdm

from ..errors import ToMeError
from ..inference.tracing import ONEDNN_TOLERANCE, distance
from .environment import describe_environment
from .inference_arms import EAGER, FREE, PLAIN, PREDICTOR, TOME, TORCH, Arm, open_arms
from .inference_cases import InferenceCase, Measurement, draw
from .inference_report import summarize
from .torch_arm import why_not

WARM_UP = 2
SETTLE = 0.3  # seconds for which OpenMP's threads may go on spinning after the work of another process
# Two dst may be equally similar to within rounding, and two programs then choose differently with nothing wrong in
# either. So parity is asked of one of several draws of the inputs, the first that shows it, and that one is timed.
TRIES = 5
# The largest difference over the largest output, from eager.
TOLERANCES = {PREDICTOR: ONEDNN_TOLERANCE, f"{TORCH} {PLAIN}": 1e-4, f"{TORCH} {TOME}": 1e-3}


def measure(case: InferenceCase, how: Measurement) -> dict[str, Any]:
    """Time one case's arms in turn, after asserting that those compute the same that should.

    Returns:
        `parity`: for each arm its largest difference from eager over the largest output; `seconds`: for each arm one
        number per round; `onednn`: the predictors' kernels; `torch`: versions, None where PyTorch was not asked for;
        and what `summarize` makes of the seconds.

    Raises:
        ToMeError: the arms disagree on every draw of the inputs; or PyTorch's process fails.
    """
    paddle.seed(0)
    unet = case.build()
    unet.eval()
    with open_arms(case, how, unet) as (arms, take, notes):
        seed, parity = _agree(case, arms, take)
        seconds = _take_turns(arms, how.rounds, SETTLE if how.torch_python else 0, case.name)
    about = {"case": case.describe(how.config), "inputs_seed": seed, "parity": parity, **notes}
    return {**about, "rounds": how.rounds, **summarize(seconds), "seconds": seconds}


def _agree(
    case: InferenceCase, arms: list[Arm], take: Callable[[dict[str, np.ndarray]], None]
) -> tuple[int, dict[str, float]]:
    """Give the arms inputs on which they agree; returns those inputs' seed and how far each arm is from eager."""
    tried = []
    for seed in range(TRIES):
        take(draw(case, seed))
        outputs = {arm.name: arm.output() for arm in arms}
        parity = {
            name: distance([out], [outputs[f"{EAGER} {name.split(' ', 1)[1]}"]])
            for name, out in outputs.items()
            if not name.startswith(EAGER)
        }
        wrong = {name: found for name, found in parity.items() if not found <= _tolerance(name)}
        _assert_merging_matters(outputs)
        if not wrong:
            return seed, parity
        tried.append(", ".join(f"{name} by {found:.1e}" for name, found in wrong.items()))
    raise ToMeError(
        f"{case.name}: not timing arms that differ from eager on {TRIES} draws of the inputs: {'; '.join(tried)}."
    )


def _tolerance(name: str) -> float:
    return TOLERANCES[name if name in TOLERANCES else name.split(" ", 1)[0]]


def _assert_merging_matters(outputs: dict[str, np.ndarray]) -> None:
    plain = outputs[f"{EAGER} {PLAIN}"]
    for kind in (TOME, FREE):
        if not distance([outputs[f"{EAGER} {kind}"]], [plain]) > 1e-4:
            raise ToMeError(f"{kind} does not change the output: not timing it.")


def _take_turns(arms: Iterable[Arm], rounds: int, settle: float, label: str) -> dict[str, list[float]]:
    """Seconds of each arm in each round; the order changes from round to round."""
    order, shuffler = list(arms), random.Random(0)
    seconds: dict[str, list[float]] = {arm.name: [] for arm in order}
    for turn in tqdm(range(WARM_UP + rounds), desc=label, unit="round", leave=False):
        shuffler.shuffle(order)
        for arm in order:
            time.sleep(settle)
            taken = arm.seconds()
            if turn >= WARM_UP:
                seconds[arm.name].append(taken)
    return seconds


def measure_all(cases: Iterable[InferenceCase], how: Measurement) -> dict[str, Any]:
    """Measure cases one after the other; returns the whole result, ready for JSON.

    Where PyTorch's interpreter cannot be used, `not_measured` says why, and the other arms are measured.

    Raises:
        ToMeError: as `measure`.
    """
    not_measured = {}
    if how.torch_python is None:
        not_measured[TORCH] = "no interpreter was given"
    elif reason := why_not(how.torch_python):
        not_measured[TORCH] = reason
        how = replace(how, torch_python=None)
    measured = [measure(case, how) for case in cases]
    return {
        "ratio": how.ratio,
        "use_rand": how.config.use_rand,
        "rounds": how.rounds,
        "warm_up": WARM_UP,
        "threads": how.threads,
        "not_measured": not_measured,
        "cases": measured,
        "peak_memory_gb": {
            who: resource.getrusage(of).ru_maxrss * 1024 / 1e9  # Linux counts in KiB
            for who, of in (("this process", resource.RUSAGE_SELF), ("PyTorch's", resource.RUSAGE_CHILDREN))
        },
        "environment": describe_environment(),
    }
