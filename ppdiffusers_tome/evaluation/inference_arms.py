"""What is timed against each other: one UNet in three backends, plain, merged and at the free-merge limit."""

import copy
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import nn

from ..config import ToMeConfig
from ..inference.programs import denoiser
from ..inference.runtime import Predictor, Runtime
from ..inference.tracing import right_for_onednn, save
from ..patch import attach
from ..positions import Grid
from .free_merge import attach_free_merge
from .inference_cases import InferenceCase, Measurement
from .torch_arm import TorchArm

# An arm's name is a backend and a kind of merging: "eager free merge".
EAGER, PREDICTOR, TORCH = "eager", "predictor", "PyTorch"
PLAIN, TOME, FREE = "plain", "ToMe", "free merge"


class Arm(NamedTuple):
    """What is timed: `seconds` makes one pass and tells how long it took."""

    name: str  # "eager ToMe": backend and kind of merging
    seconds: Callable[[], float]
    output: Callable[[], np.ndarray]


@contextmanager
def open_arms(
    case: InferenceCase, how: Measurement, unet: nn.Layer
) -> Iterator[tuple[list[Arm], Callable[[dict[str, np.ndarray]], None], dict[str, Any]]]:
    """The arms, a function that gives all of them their inputs, and what is to be noted of them.

    Raises:
        ToMeExportError: a program without oneDNN is further than 1e-5 from eager.
        ToMeError: PyTorch's process fails.
    """
    given: dict[str, Any] = {}
    notes: dict[str, Any] = {"onednn": {}, "export_seconds": {}, "torch": None}
    arms: list[Arm] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench_inference_")))
        torch_arm = None
        if how.torch_python:
            merging = {"ratio": how.ratio, "use_rand": False}
            torch_arm = stack.enter_context(TorchArm(how.torch_python, folder, unet, how.threads, merging))
            notes["torch"] = torch_arm.about
            for kind, name in ((PLAIN, "plain"), (TOME, "tomesd")):
                arms.append(Arm(f"{TORCH} {kind}", partial(torch_arm.seconds, name), partial(torch_arm.output, name)))
        for kind, model in _merged_copies(unet, how.config, case):
            arms.append(_timed(f"{EAGER} {kind}", partial(_eager, model, given)))
            start = time.perf_counter()
            dims = {"latent_height": case.latent, "latent_width": case.latent}
            sizes = {**dims, "tokens": case.text}
            saved = save(
                denoiser(model, None, is_size_known=True),
                folder / kind.replace(" ", "_"),
                dims,
                sizes,
                f"{kind} UNet",
                how.threads,
            )
            onednn = right_for_onednn(saved.onednn_parity)
            predictor = Predictor(saved.program, saved.params, Runtime(threads=how.threads, onednn=onednn))
            arms.append(_timed(f"{PREDICTOR} {kind}", partial(_predict, predictor, given)))
            notes["onednn"][kind] = onednn
            notes["export_seconds"][kind] = time.perf_counter() - start

        def take(inputs: dict[str, np.ndarray]) -> None:
            given.update({name: paddle.to_tensor(value) for name, value in inputs.items()})
            if torch_arm:
                torch_arm.take(inputs)

        yield arms, take, notes


def _merged_copies(unet: nn.Layer, config: ToMeConfig, case: InferenceCase) -> Iterator[tuple[str, nn.Layer]]:
    yield PLAIN, unet
    merged = copy.deepcopy(unet)
    attach(merged, config, None)
    yield TOME, merged
    cut = copy.deepcopy(unet)
    attach_free_merge(cut, config, Grid(case.latent, case.latent))
    yield FREE, cut


def _timed(name: str, run: Callable[[], np.ndarray]) -> Arm:
    def seconds() -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return Arm(name, seconds, run)


@paddle.no_grad()
def _eager(model: nn.Layer, given: dict[str, paddle.Tensor]) -> np.ndarray:
    return model(given["sample"], given["timestep"], given["text"], return_dict=False)[0].numpy()


def _predict(predictor: Predictor, given: dict[str, paddle.Tensor]) -> np.ndarray:
    inputs = {"sample": given["sample"], "timestep": given["timestep"], "encoder_hidden_states": given["text"]}
    return predictor(**inputs)[0].numpy()
