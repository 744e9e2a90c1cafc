"""Measure which steps must keep all tokens: images by sampler, guidance and number of steps, plain and merged.

    python benchmarks/samplers.py                              # the tables, from the result
    python benchmarks/samplers.py measure                      # generate what is missing, as files in build/samplers/
    python benchmarks/samplers.py time                         # seconds of passes and images: a quiet machine
    python benchmarks/samplers.py collect                      # write the result and a sheet from the files

`measure` may run in two processes, which share the work. Images are generated in ONNX Runtime on one thread. An arm
with steps of its own switches between the merged program of all steps and the plain one; a test shows that a program
with plain steps gives the same. All arms of a setting have the same prompts and noise.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from filelock import FileLock, Timeout
from lab.arm import read_config
from lab.cache import digest, model_files
from lab.markdown import frame_table
from lab.quality.image_sets import photograph, with_seeds
from lab.result_files import make_result, read_json
from lab.timing import time_in_turns
from PIL import Image

from ppdiffusers_tome import ToMeConfig
from ppdiffusers_tome.comparison.environment import commit, describe_environment
from ppdiffusers_tome.comparison.results import write_result
from ppdiffusers_tome.comparison.sheets import make_sheet, save_jpeg
from ppdiffusers_tome.families import schedules
from ppdiffusers_tome.methods.steps import PLAIN_STEPS, PlainSteps
from ppdiffusers_tome.methods.turns import turn_table
from ppdiffusers_tome.wording import merging_in_words

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "samplers.json"
SHEET = ROOT / "benchmarks" / "samplers_sheet.jpg"
FOLDER = ROOT / "build" / "samplers"
COUNT = 6  # images of each arm and setting
NEVER = 2000.0  # a timestep that no step has
NO_PLAIN_STEPS = PlainSteps(NEVER, NEVER, NEVER)
RUNTIMES = ("onnxruntime", "openvino")  # the first one generates the images
WINDOW, CHANGED = 32, 0.2  # px and root mean square difference: where a thing in an image is another one
SAMPLERS = {  # by name: class in ppdiffusers, settings
    "DDIM": ("DDIMScheduler", {}),
    "DPM-Solver++": ("DPMSolverMultistepScheduler", {}),
    "DPM-Solver++, Karras": ("DPMSolverMultistepScheduler", {"use_karras_sigmas": True}),
    "Euler": ("EulerDiscreteScheduler", {}),
    "PNDM": ("PNDMScheduler", {"skip_prk_steps": True}),  # as in the config of Stable Diffusion 1.5
}


class Setting(NamedTuple):
    """How images are generated."""

    model: str  # folder in `examples`
    sampler: str  # of SAMPLERS
    guidance: float
    steps: int  # that run
    strength: float | None = None  # of image-to-image from photographs; None: from noise

    @property
    def size(self) -> int:
        """Side of an image in px."""
        return 256 if self.model == "scenes_sd" else 128

    @property
    def title(self) -> str:
        """The setting in words."""
        start = "" if self.strength is None else f", photographs at {self.strength:g}"
        return f"{self.model}, {self.sampler}, {self.steps} steps, guidance {self.guidance:g}{start}"


class Arm(NamedTuple):
    """A way to generate the images of a setting.

    Args:
        name: in tables.
        config: how tokens merge; None: they do not.
        plain: the steps that keep all tokens, by switching programs; None: as the program of the config decides.
        steps: share of the setting's steps that run.
    """

    name: str
    config: ToMeConfig | None = None
    plain: PlainSteps | None = None
    steps: float = 1.0


def merging(config: ToMeConfig) -> Arm:
    """An arm whose program merges by a config."""
    return Arm(merging_in_words(config), config)


def switching(ratio: float, plain: PlainSteps, name: str) -> Arm:
    """An arm that switches between the program that merges in all steps and the plain one."""
    return Arm(name, ToMeConfig(ratio, merge_steps="all"), plain)


PLAIN = Arm("plain")
DEFAULT = merging(ToMeConfig())
ALL, HALF = (merging(ToMeConfig(ratio, merge_steps="all")) for ratio in (0.75, 0.5))
FEWER = Arm("plain, 0.7 of the steps", steps=0.7)
TODO = merging(ToMeConfig(method="todo"))
ARMS = (DEFAULT, ALL, HALF, FEWER)  # of each setting; HALF and FEWER have about the gain of the default
# Other steps, and other ratios, in place of the default's.
FRONTIER = (
    TODO,
    switching(0.75, PlainSteps(900, 20, 115), "interlace 0.75, plain from 900 on, and at 20 to 115"),
    switching(0.75, PlainSteps(700, 20, 115), "interlace 0.75, plain from 700 on, and at 20 to 115"),
    switching(0.75, PlainSteps(800, NEVER, NEVER), "interlace 0.75, plain from 800 on"),
    switching(0.75, PlainSteps(NEVER, 20, 115), "interlace 0.75, plain at 20 to 115"),
    switching(0.875, PLAIN_STEPS, "interlace 0.875"),
    switching(0.5, PLAIN_STEPS, "interlace 0.5"),
)
FOUR = {
    "ddim-3": Setting("scenes_sd", "DDIM", 3.0, 20),
    "ddim-7.5": Setting("scenes_sd", "DDIM", 7.5, 20),
    "dpm-3": Setting("scenes_sd", "DPM-Solver++", 3.0, 20),
    "dpm-7.5": Setting("scenes_sd", "DPM-Solver++", 7.5, 20),
}
SETTINGS = {
    **FOUR,
    "pndm": Setting("scenes_sd", "PNDM", 7.5, 50),
    "dpm-10-steps": Setting("scenes_sd", "DPM-Solver++", 7.5, 10),
    "karras": Setting("scenes_sd", "DPM-Solver++, Karras", 7.5, 20),
    "euler": Setting("scenes_sd", "Euler", 7.5, 20),
    "photographs-0.5": Setting("scenes_sd", "DPM-Solver++", 7.5, 20, 0.5),
    "photographs-0.8": Setting("scenes_sd", "DPM-Solver++", 7.5, 20, 0.8),
    "emoji-ddim-3": Setting("emoji_sd", "DDIM", 3.0, 20),
    "emoji-dpm-7.5": Setting("emoji_sd", "DPM-Solver++", 7.5, 20),
    "emoji-photographs-0.5": Setting("emoji_sd", "DDIM", 3.0, 20, 0.5),
}


def arms_of(setting: Setting) -> Sequence[Arm]:
    """The arms of a setting, without the plain one."""
    return (*ARMS, *FRONTIER) if setting in FOUR.values() else ARMS


# Generate


class Switched:
    """Replaces a pipeline's UNet: the merged program, and the plain one in some steps."""

    def __init__(self, unet: Any, ratio: float, plain: PlainSteps) -> None:
        self.config, self.dtype = unet.config, unet.dtype
        self._unet, self._ratio, self._plain = unet, ratio, plain

    def __call__(self, sample: Any, timestep: Any, *args: Any, **kwargs: Any) -> Any:
        self._unet.ratio = 0.0 if self._plain.count(schedules.as_numbers(timestep)) else self._ratio
        return self._unet(sample, timestep, *args, **kwargs)


@cache
def exported(model: str, config: ToMeConfig, runtime: str) -> Any:
    """A pipeline of the programs of a config at all ratios that its arms have, and of the plain program."""
    from ppdiffusers_tome.export.loading import load_eager_pipeline
    from ppdiffusers_tome.inference import export_pipeline, load_pipeline

    configs = [arm.config for arm in (*ARMS, *FRONTIER) if arm.config is not None]
    ratios = sorted({one.effective_ratio for one in configs if same(one, config)})
    folder = FOLDER / "programs" / digest([model, model_files(f"examples/{model}"), decisive(config), ratios])
    with FileLock(f"{folder}.lock"):
        if not (folder / "tome.json").exists():
            pipe = load_eager_pipeline(f"examples/{model}", safety_checker=False)
            settings = {name: value for name, value in config.changed_settings().items() if name != "ratio"}
            export_pipeline(pipe, folder, [*ratios, 0], image_to_image=True, format="onnx", **settings)
    pipe = load_pipeline(folder, runtime=runtime, threads=1)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def same(config: ToMeConfig, other: ToMeConfig) -> bool:
    """Whether two configs differ in their ratio alone."""
    return config.with_settings(ratio=None) == other.with_settings(ratio=None)


def decisive(config: ToMeConfig) -> list[Any]:
    """What decides which tokens a config keeps, ready for JSON, without its ratio."""
    turns = turn_table().tolist() if config.takes_turns else []
    return [config.with_settings(ratio=None).changed_settings(), turns, config.has_plain_steps and PLAIN_STEPS]


def exported_for(model: str, config: ToMeConfig | None, runtime: str = RUNTIMES[0]) -> Any:
    """The pipeline of a config's programs; without one, one that has the plain program."""
    config = config or TODO.config
    assert config is not None
    return exported(model, config.with_settings(ratio=None), runtime)


def pipeline_for(setting: Setting, arm: Arm) -> Any:
    """The pipeline of an arm."""
    import ppdiffusers

    pipe = exported_for(setting.model, arm.config)
    parts = {**pipe.components}
    if arm.plain is not None and arm.config is not None:
        parts["unet"] = Switched(pipe.unet, arm.config.effective_ratio, arm.plain)
    else:
        pipe.unet.ratio = 0.0 if arm.config is None else arm.config.effective_ratio
    parts["scheduler"] = scheduler_of(setting)
    kind = "StableDiffusionPipeline" if setting.strength is None else "StableDiffusionImg2ImgPipeline"
    made = getattr(ppdiffusers, kind)(**parts, requires_safety_checker=False)
    made.set_progress_bar_config(disable=True)
    return made


def prompts_of(model: str) -> tuple[tuple[str, int], ...]:
    """(text, seed) of each image."""
    from ppdiffusers_tome.serving.prompt_file import model_prompts

    return with_seeds(model_prompts(f"examples/{model}", "--model"), COUNT, 0)


def generate(setting: Setting, arm: Arm, number: int) -> np.ndarray:  # [H, W, 3] float32 from 0 to 1
    """One image."""
    import paddle

    text, seed = prompts_of(setting.model)[number]
    steps = round(arm.steps * setting.steps)
    inputs: dict[str, Any] = {"height": setting.size, "width": setting.size}
    if setting.strength is not None:
        steps = round(steps / setting.strength)
        name = ("astronaut", "chelsea", "coffee", "motorcycle_left", "rocket", "brick")[number]
        inputs = {"image": photograph(name, setting.size), "strength": setting.strength}
    paddle.seed(seed)
    pipe, settings = pipeline_for(setting, arm), {"num_inference_steps": steps, "guidance_scale": setting.guidance}
    image: np.ndarray = pipe(text, output_type="np", **inputs, **settings).images[0]
    return image.astype("float32")


def image_file(setting: Setting, arm: Arm, number: int) -> Path:
    """The file of an image."""
    merging = arm.config and [decisive(arm.config), arm.config.effective_ratio]
    parts = [setting, merging, arm.plain, arm.steps, prompts_of(setting.model)[number]]
    return FOLDER / "images" / f"{digest(parts)}.npy"


def measure(names: Sequence[str]) -> None:
    """Generate the images that are missing; those of arms with these names, or all."""
    (FOLDER / "images").mkdir(parents=True, exist_ok=True)
    (FOLDER / "programs").mkdir(exist_ok=True)
    jobs = [
        (setting, arm, number)
        for arms in ((PLAIN, *ARMS), FRONTIER)
        for setting in (SETTINGS.values() if arms != FRONTIER else reversed(FOUR.values()))
        for arm in (PLAIN, *arms_of(setting))
        for number in range(COUNT)
        if arm in arms and (not names or arm.name in names)
    ]
    for setting, arm, number in jobs:
        file = image_file(setting, arm, number)
        try:
            with FileLock(f"{file}.lock", timeout=0):
                if not file.exists():
                    np.save(part := file.with_suffix(".part.npy"), generate(setting, arm, number))
                    part.rename(file)
                    print(f"{setting.title}: {arm.name}, {number + 1} of {COUNT}", flush=True)
        except Timeout:
            continue  # another process generates it


# The result


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    """Peak signal-to-noise ratio of images from 0 to 1, in dB; at most 120."""
    return float(-10 * np.log10(max(float(np.mean((a - b) ** 2)), 1e-12)))


def largest_change(a: np.ndarray, b: np.ndarray) -> float:
    """The largest root mean square difference in a window of WINDOW px; windows overlap by half."""
    squares, step = ((a - b) ** 2).mean(-1), WINDOW // 2
    corners = range(0, len(squares) - WINDOW + 1, step)
    return float(max(squares[y : y + WINDOW, x : x + WINDOW].mean() for y in corners for x in corners) ** 0.5)


def scheduler_of(setting: Setting) -> Any:
    """The scheduler of a setting, made from that of the model."""
    import ppdiffusers

    name, settings = SAMPLERS[setting.sampler]
    own = read_json(ROOT / "examples" / setting.model / "scheduler" / "scheduler_config.json")
    return getattr(ppdiffusers, name).from_config({**own, **settings})


def timesteps_of(setting: Setting, steps: int) -> list[float]:
    """The timesteps of the passes of an image."""
    total = steps if setting.strength is None else round(steps / setting.strength)
    timesteps = schedules.timesteps_of(scheduler_of(setting), total)
    assert timesteps is not None
    return timesteps if setting.strength is None else timesteps[-min(int(total * setting.strength), total) :]


def collect() -> dict[str, Any]:
    """The content of the result, from the files of all images."""
    settings = []
    for key, setting in SETTINGS.items():
        plain = [np.load(image_file(setting, PLAIN, number)) for number in range(COUNT)]
        entry: dict[str, Any] = {
            "key": key,
            **setting._asdict(),
            "passes": len(timesteps_of(setting, setting.steps)),
            "arms": [],
        }
        for arm in arms_of(setting):
            images = [np.load(image_file(setting, arm, number)) for number in range(COUNT)]
            pairs = list(zip(images, plain, strict=True))
            timesteps = timesteps_of(setting, round(arm.steps * setting.steps))
            own = PLAIN_STEPS if arm.config is not None and arm.config.has_plain_steps else NO_PLAIN_STEPS
            entry["arms"].append(
                {
                    "name": arm.name,
                    "merging": arm.config and arm.config.settings(),
                    "passes": len(timesteps),
                    "plain": len(timesteps) if arm.config is None else (arm.plain or own).count(timesteps),
                    "psnr": [round(psnr(*pair), 2) for pair in pairs],
                    "largest_change": [round(largest_change(*pair), 3) for pair in pairs],
                }
            )
        settings.append(entry)
    prompts = {model: prompts_of(model) for model in dict.fromkeys(setting.model for setting in SETTINGS.values())}
    return {"prompts": prompts, "settings": settings}


def write_sheet() -> None:
    """Write the images of a setting as a JPEG, a row for each arm."""
    setting, rows = FOUR["dpm-7.5"], []
    for arm in (PLAIN, *ARMS):
        images = [np.load(image_file(setting, arm, number)).clip(0, 1) for number in range(COUNT)]
        rows.append((arm.name, [Image.fromarray((255 * image).round().astype("uint8")) for image in images]))
    prompts = [text for text, _ in prompts_of(setting.model)]
    save_jpeg(make_sheet(rows, prompts, setting.size), SHEET, setting=setting.title, command=command())


def time_all(rounds: int) -> dict[str, Any]:
    """Seconds of a plain and a merged pass, of both in the default program, and of whole images, in turns."""
    import paddle

    setting = FOUR["dpm-7.5"]
    random = np.random.RandomState(0)
    inputs = {
        "sample": paddle.to_tensor(random.standard_normal([2, 4, 64, 64]).astype("float32")),
        "encoder_hidden_states": paddle.to_tensor(random.standard_normal([2, 77, 192]).astype("float32")),
    }

    def one_pass(arm: Arm, timestep: float, runtime: str) -> Any:
        unet = exported_for(setting.model, arm.config, runtime).unet

        def run() -> None:
            unet.ratio = arm.config.effective_ratio if arm.config else 0.0
            unet(timestep=paddle.to_tensor([timestep]), **inputs)

        return run

    merged, plain = 501.0, 951.0
    more = merging(ToMeConfig(0.875, merge_steps="all"))
    seconds = {}
    for runtime in RUNTIMES:
        passes = {arm.name: one_pass(arm, merged, runtime) for arm in (PLAIN, DEFAULT, ALL, HALF, more, TODO)}
        passes[f"{DEFAULT.name}, a plain step"] = one_pass(DEFAULT, plain, runtime)
        seconds[runtime] = time_in_turns(passes, rounds, warm_up=1)
    of_images = {arm.name: lambda arm=arm: generate(setting, arm, 0) for arm in (PLAIN, DEFAULT)}
    about = {"command": command(), "commit": commit(), "environment": describe_environment(), "threads": 1}
    images = time_in_turns(of_images, 3, warm_up=1)
    return {**about, "setting": setting._asdict(), "passes": seconds, "images": images}


# The tables


def pass_gain(timing: dict[str, Any], name: str, runtime: str = RUNTIMES[0]) -> float:
    """How many times as fast a merged pass is as a plain one: the median of the ratios within rounds."""
    passes = timing["passes"][runtime]
    pairs = zip(passes[PLAIN.name], passes[name], strict=True)
    return float(np.median([a / b for a, b in pairs]))


def image_gain(timing: dict[str, Any], setting: dict[str, Any], arm: dict[str, Any]) -> float:
    """The gain of an image of `scenes_sd`, from those of its passes."""
    if arm["merging"] is None:
        return setting["passes"] / arm["passes"]
    gain = pass_gain(timing, merging_in_words(read_config(arm["merging"])))
    return gain_with_plain_steps(gain, arm["plain"] / arm["passes"])


def gain_with_plain_steps(gain: float, share: float) -> float:
    """The gain of an image, from that of a pass that merges and the share of the passes that are plain."""
    return 1 / (share + (1 - share) / gain)


def title_of(setting: dict[str, Any]) -> str:
    """The title of a setting in a result."""
    return Setting(*(setting[name] for name in Setting._fields)).title


def rows_of(result: dict[str, Any], setting: dict[str, Any]) -> pd.DataFrame:
    """The arms of a setting, as a table's cells."""
    rows = []
    for arm in setting["arms"]:
        values, changes = np.array(arm["psnr"]), np.array(arm["largest_change"])
        is_timed = setting["model"] == "scenes_sd" and result["timing"] is not None
        rows.append(
            {
                "arm": arm["name"],
                "plain steps": f"{arm['plain']} of {arm['passes']}",
                "gain of an image": f"{image_gain(result['timing'], setting, arm):.2f}×" if is_timed else None,
                "mean, dB": f"{values.mean():.1f}",
                "median": f"{np.median(values):.1f}",
                "worst": f"{values.min():.1f}",
                "another thing": f"{(changes > CHANGED).sum()} of {len(changes)}",
            }
        )
    return pd.DataFrame(rows).set_index("arm")


def report(result: dict[str, Any]) -> str:
    """A table for each setting."""
    parts = [f"{title_of(setting)}\n\n{frame_table(rows_of(result, setting))}" for setting in result["settings"]]
    return "\n\n".join(parts)


def command() -> str:
    return shlex.join(["python", "benchmarks/samplers.py", *sys.argv[1:]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mode", nargs="?", choices=("report", "measure", "time", "collect"), default="report")
    parser.add_argument("--only", nargs="*", default=[], metavar="ARM", help="of measure (default: all)")
    parser.add_argument("--rounds", type=int, default=7, help="of time (default: %(default)s)")
    options = parser.parse_args()
    if options.mode == "measure":
        measure(options.only)
        return
    result = read_json(RESULT) if RESULT.exists() else {"timing": None, "prompts": {}, "settings": []}
    if options.mode != "report":
        content = {name: result[name] for name in ("timing", "prompts", "settings")}
        content |= {"timing": time_all(options.rounds)} if options.mode == "time" else collect()
        if options.mode == "collect":
            write_sheet()
        result = make_result("experiments", command(), **content)
        write_result(RESULT, result)
    print(report(result))


if __name__ == "__main__":
    main()
