"""`tome.json` of release 3.0.0, which has format 1, in the format of today."""

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, with_config
from typing_extensions import TypedDict

from ..wording import controlnet_in_words, settings_in_words
from .folder import ONNX_WEIGHTS
from .ratios import ratio_name

# Of `ToMeConfig`, which had no `merge_steps` in 3.0.0: "interlace" merged in all steps.
DEFAULTS: dict[str, Any] = {
    "max_downsample": None,
    "sx": 2,
    "sy": 2,
    "use_rand": True,
    "seed": 0,
    "merge_attn": True,
    "merge_crossattn": False,
    "merge_mlp": False,
    "min_tokens": 0,
    "merge_steps": "middle",
}


@with_config({"extra": "allow"})
class Settings(TypedDict):
    """Those of a `ToMeConfig`, by name, with the ones that its method did not have."""

    ratio: float
    method: str


class Program(TypedDict):
    """A program, whose weights as ONNX are beside it."""

    model: str
    size: list[int] | None
    ratio: float | None
    program: str | None
    params: str | None
    parity: dict[str, float]
    onednn_parity: dict[str, float]
    onnx: str | None
    onnx_parity: dict[str, float]


class Content(TypedDict):
    """The fields that differ from those of today."""

    ratios: list[float]
    merging: dict[str, tuple[Settings | None, Settings | None]]  # of UNet and ControlNet, by ratio in six digits
    residuals: int
    programs: list[Program]


def in_current_format(content: dict[str, Any]) -> dict[str, Any]:
    """The content of a `tome.json` of format 1 as 3.0.0 would write it today.

    Raises:
        pydantic.ValidationError: a field is missing or wrong.
    """
    old = TypeAdapter(Content).validate_python(content)
    merging = []
    for ratio in old["ratios"]:
        unet, controlnet = old["merging"].get(ratio_name(ratio), (None, None)) if ratio else (None, None)
        words = "" if unet is None else _words(unet)
        if words and controlnet is not None and old["residuals"]:
            words += controlnet_in_words(controlnet["ratio"], _words(controlnet))
        merging.append({"ratio": ratio, "words": words, "settings": None if unet is None else _changed(unet)})
    same = {name: value for name, value in content.items() if name != "ratios"}
    return same | {"format": 2, "merging": merging, "programs": [*map(_program, old["programs"])]}


def _words(settings: Settings) -> str:
    """The method and the settings that differ from their defaults, without the ratio."""
    further = {name: value for name, value in _changed(settings).items() if name not in ("ratio", "method")}
    return f"{settings['method']}, {settings_in_words(further)}" if further else settings["method"]


def _changed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Ratio, method and the settings that differ from their defaults."""
    own = {**settings}
    if settings["method"] == "interlace":
        own["merge_steps"] = settings.get("merge_steps", "all")
    return {name: value for name, value in own.items() if name not in DEFAULTS or value != DEFAULTS[name]}


def _program(old: Program) -> dict[str, Any]:
    files: dict[str, Any] = {}
    if old["program"] is not None:
        parities = {"parity": old["parity"], "onednn_parity": old["onednn_parity"]}
        files["paddle"] = {"program": old["program"], "weights": old["params"], **parities}
    if old["onnx"] is not None:
        weights = f"onnx/{old['model']}{ONNX_WEIGHTS}"
        files["onnx"] = {"program": old["onnx"], "weights": weights, "parity": old["onnx_parity"]}
    return {"model": old["model"], "size": old["size"], "ratio": old["ratio"], "files": files}
