"""The options of the command line that name ways to merge: --method by name, --merging as text, --config as files."""

import argparse
from pathlib import Path
from typing import Any

from ..config import ToMeConfig, check_names
from ..errors import ToMeConfigError
from ..methods import METHODS

EXAMPLE = "method=kv,ratio=0.75"
_WORDS = {"": True, "true": True, "false": False, "none": None}


def add_merge_options(group: argparse._ActionsContainer, about: str, is_single: bool = False) -> None:
    """Add --method, --merging and --config, which `read_methods` reads.

    Args:
        about: what the ways to merge are for, in words.
        is_single: allow one way to merge only.
    """
    place = group.add_mutually_exclusive_group() if is_single else group
    number: Any = 1 if is_single else "+"
    listed = "; ".join(f"{method.name}: {method.description}" for method in METHODS.values())
    place.add_argument("--method", nargs=number, default=[], choices=METHODS, help=f"{about}, by name. {listed}")
    text = f"{about}: settings of ToMeConfig, such as {EXAMPLE}"
    place.add_argument("--merging", nargs=number, default=[], metavar="SETTINGS", help=text)
    file = "the same from a settings file, which tune and ToMeConfig.save write"
    place.add_argument("--config", nargs=number, default=[], type=Path, metavar="FILE", help=file)


def read_methods(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The ways to merge that the options name, each as arguments of `ToMeConfig`: those of files first.

    A file always names its ratio. Its other settings are left out where they have their default values. What a method
    or text names has a ratio too if its method has a default of its own, as "todo" has.

    Raises:
        ToMeConfigError: a file cannot be read, or a setting does not exist or is not allowed.
    """
    of_files = [ToMeConfig.load(path).changed_settings() for path in options.config]
    named = [{"method": name} for name in options.method] + [parse_settings(text) for text in options.merging]
    return of_files + [_with_own_ratio(settings) for settings in named]


def _with_own_ratio(settings: dict[str, Any]) -> dict[str, Any]:
    ratio = ToMeConfig(**settings).ratio
    return settings if ratio == ToMeConfig().ratio else {**settings, "ratio": ratio}


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
    return [ToMeConfig(**(settings | {"ratio": ratio})) for ratio in options.ratio]


def parse_settings(text: str) -> dict[str, Any]:
    """The settings in a text such as "window=16,proportional,ratio=0.7", as arguments of `ToMeConfig`.

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
