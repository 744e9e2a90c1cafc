"""Adds tomesd on PyTorch to an evaluation: the UNet runs in PyTorch and tomesd merges; all else is as in `evaluate`.

    python benchmarks/evaluate.py --model examples/scenes_sd --output build/evaluate
    python benchmarks/tomesd_quality.py build/evaluate --ratio 0.5 --torch-python PYTHON

Images differ from those of this library by the merging alone: the weights, the noise and the VAE are the same. The
settings "tomesd … (PyTorch)" become a part of `quality.json` and of its report. tomesd has no seed: it samples its
random dst anew in every pass.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from lab.arm import PYTORCH, Arm
from lab.quality.evaluation import Measurer, calibrate, entry_of
from lab.quality.image_generation import generate_arm, load_model
from lab.quality.image_sets import Evaluation
from lab.torch_unet import TorchProcess
from ppdiffusers import StableDiffusionPipeline

from ppdiffusers_tome import ToMeConfig, ToMeConfigError
from ppdiffusers_tome.comparison.results import check_result, read_json, write_result
from ppdiffusers_tome.comparison.sheets import image_paths
from ppdiffusers_tome.serving.engine import Engine
from ppdiffusers_tome.serving.offline import generate_here


class RemoteUNet:
    """The UNet of a StableDiffusionPipeline, computed by PyTorch and merged by tomesd with its defaults."""

    dtype = paddle.float32

    def __init__(self, config: Any, process: TorchProcess, ratio: float) -> None:
        self.config = config
        self._process = process
        self._ratio = ratio

    def __call__(
        self,
        sample: paddle.Tensor,  # [B, C, h, w]
        timestep: Any,
        encoder_hidden_states: paddle.Tensor,  # [B, T, D]
        **_: Any,  # None, and return_dict=False
    ) -> tuple[paddle.Tensor]:
        inputs = {"sample": sample.numpy(), "encoder_hidden_states": encoder_hidden_states.numpy()}
        self._process.set_inputs({**inputs, "timestep": np.asarray(timestep, "float32").reshape(1)})
        return (paddle.to_tensor(self._process.output({"ratio": self._ratio})),)


def add_tomesd(folder: Path, ratios: list[float], torch_python: str) -> None:
    """Generate and measure the images of tomesd at these ratios, and write them to the folder's result."""
    file = folder / "quality.json"
    result = read_json(file)
    check_result(result, "quality", file)
    fields = ("model", "size", "steps", "guidance_scale", "threads", "strength")
    prompts = tuple((prompt["prompt"], prompt["seed"]) for prompt in result["prompts"])
    evaluation = Evaluation(**{name: result[name] for name in fields}, prompts=prompts)
    pipe = load_model(evaluation.model)
    if type(pipe) is not StableDiffusionPipeline:
        raise ToMeConfigError(
            f"{evaluation.model} is a {type(pipe).__name__}: tomesd needs a StableDiffusionPipeline."
        )
    arms = [Arm(ToMeConfig(ratio, "tomesd"), PYTORCH) for ratio in ratios]
    with (
        tempfile.TemporaryDirectory(prefix="tomesd_") as exchange,
        TorchProcess(torch_python, Path(exchange), pipe.unet, evaluation.threads) as process,
    ):
        for arm in arms:
            unet = RemoteUNet(pipe.unet.config, process, arm.ratio)
            remote = StableDiffusionPipeline(**{**pipe.components, "unet": unet}, requires_safety_checker=False)
            engine = Engine(remote, None, f"{evaluation.model} in PyTorch")
            generate_arm(evaluation, arm, folder, generate_here(lambda engine=engine: engine), batch=1)
        result["torch"] = dict(process.versions)
    measurer = Measurer(folder, evaluation.size)
    _, references = calibrate(measurer, image_paths(Path(result["real"]["folder"])) if result["real"] else [])
    added = {arm.name: entry_of(measurer, arm, references) for arm in arms}
    result["settings"] = [entry for entry in result["settings"] if entry["name"] not in added] + list(added.values())
    write_result(file, result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="what `evaluate --output` wrote")
    parser.add_argument("--ratio", type=float, nargs="+", default=[0.5])
    parser.add_argument("--torch-python", required=True, help="interpreter with torch, diffusers and tomesd")
    options = parser.parse_args()
    add_tomesd(options.folder, options.ratio, options.torch_python)


if __name__ == "__main__":
    main()
