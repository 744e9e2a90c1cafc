"""The options of the command line that name ways to merge: --method by name, --merging as text, --config as files."""

import argparse
from pathlib import Path
from typing import Any

from ..errors import ToMeConfigError
from ..method_names import DESCRIPTIONS
from ..methods import ToMeConfig
from ..methods.config import check_names, why_no_method
from .image_options import naming_options

EXAMPLE = "method=todo,ratio=0.5"
_WORDS = {"": True, "true": True, "false": False, "none": None}


def add_merge_options(group: argparse._ActionsContainer, about: str, is_single: bool = False) -> None:
    """Add --method, --merging and --config, which `read_methods` reads.

    Args:
        about: what the ways to merge are for, in words.
        is_single: allow a single way to merge only.
    """
    place = group.add_mutually_exclusive_group() if is_single else group
    number: Any = 1 if is_single else "+"
    listed = "; ".join(f"{name}: {description}" for name, description in DESCRIPTIONS.items())
    help_text = f"{about}, by name. {listed}"
    place.add_argument("--method", nargs=number, default=[], type=_method, choices=DESCRIPTIONS, help=help_text)
    text = f"{about}: settings of ToMeConfig, such as {EXAMPLE}"
    place.add_argument("--merging", nargs=number, default=[], metavar="SETTINGS", help=text)
    file = "the same from a settings file, which compare --save and ToMeConfig.save write"
    place.add_argument("--config", nargs=number, default=[], type=Path, metavar="FILE", help=file)


def _method(name: str) -> str:
    """The name of a method, as an option takes it."""
    if name not in DESCRIPTIONS:
        raise argparse.ArgumentTypeError(why_no_method(name))
    return name


def read_methods(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The ways to merge that the options name, each as arguments of `ToMeConfig`: those of files first.

    A file always names its ratio. Further settings are left out where they have their default values. What a method
    or text names has a ratio too if its method allows few, as "todo" does. `ToMeConfig` checks the values of
    --merging, together with a ratio from another option.

    Raises:
        ToMeConfigError: a file cannot be read, or a setting does not exist.
    """
    of_files = [ToMeConfig.load(path).changed_settings() for path in options.config]
    named = [{"method": name} for name in options.method] + [parse_settings(text) for text in options.merging]
    return of_files + [_with_own_ratio(settings) for settings in named]


def _with_own_ratio(settings: dict[str, Any]) -> dict[str, Any]:
    config = ToMeConfig(**settings)
    return settings if config.allowed_ratios is None else {**settings, "ratio": config.effective_ratio}


def merge_configs(options: argparse.Namespace) -> list[ToMeConfig]:
    """The config of the one way to merge that the options name, by default the defaults, at each --ratio.

    Without --ratio it has its own ratio, or the default.

    Raises:
        ToMeConfigError: as `read_methods`, or a setting or ratio is not allowed.
    """
    methods = read_methods(options)
    settings = methods[0] if methods else {}
    if options.ratio is None:
        return [ToMeConfig(**settings)]
    with naming_options():
        return [ToMeConfig(**(settings | {"ratio": ratio})) for ratio in options.ratio]


def all_configs(options: argparse.Namespace) -> list[ToMeConfig]:
    """The configs of all ways to merge that the options name, by default the defaults, each once.

    Each way has every --ratio that it allows; its own without --ratio, or if it allows none of them.

    Raises:
        ToMeConfigError: as `read_methods`, a setting is not allowed, or no way to merge allows a ratio.
    """
    configs: list[ToMeConfig] = []
    refusals = dict[float, ToMeConfigError]()
    allowed = set[float]()
    for settings in read_methods(options) or [{}]:
        own, at_ratios = ToMeConfig(**settings), []
        for ratio in options.ratio or ():
            try:
                at_ratios.append(ToMeConfig(**settings | {"ratio": ratio}))
                allowed.add(ratio)
            except ToMeConfigError as error:  # of the ratio, because all remaining settings are those of `own`
                refusals[ratio] = error
        configs += at_ratios or [own]
    with naming_options():
        for ratio, refusal in refusals.items():
            if ratio not in allowed:
                raise refusal
    return list({tuple(config.settings().items()): config for config in configs}.values())


def parse_settings(text: str) -> dict[str, Any]:
    """The settings in a text such as "method=tomesd,merge_mlp,ratio=0.3", as arguments of `ToMeConfig`.

    A name without a value is True; "none" is None. Values are checked when a config is made of them.

    Raises:
        ToMeConfigError: a name is not a setting, or is repeated.
    """
    settings: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name in settings:
            raise ToMeConfigError(f"{text!r:.200}: {name!r} is repeated: pass it once.")
        try:
            check_names([name])
        except ToMeConfigError as error:
            raise ToMeConfigError(f"{text!r:.200}: {error}") from None
        settings[name] = _WORDS[value.lower()] if value.lower() in _WORDS else _number(value)
    return settings


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
