"""The options of the command line that name ways to merge: --merging as text, --config as settings files."""

import argparse
from pathlib import Path
from typing import Any

from ..config import ToMeConfig, parse_settings

EXAMPLE = "merge_attn=kv,ratio=0.75"


def add_merge_options(group: argparse._ActionsContainer, about: str, is_single: bool = False) -> None:
    """Add --merging and --config, which `read_methods` reads.

    Args:
        about: what the ways to merge are for, in words.
        is_single: allow one way to merge only.
    """
    place = group.add_mutually_exclusive_group() if is_single else group
    number: Any = 1 if is_single else "+"
    text = f"{about}: settings of ToMeConfig, such as {EXAMPLE}"
    place.add_argument("--merging", nargs=number, default=[], metavar="SETTINGS", help=text)
    file = "the same from a settings file, which tune and ToMeConfig.save write"
    place.add_argument("--config", nargs=number, default=[], type=Path, metavar="FILE", help=file)


def read_methods(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The ways to merge that the options name, each as arguments of `ToMeConfig`: those of files, then the others.

    A file always names its ratio. Its other settings are left out where they have their default values. `ToMeConfig`
    checks the values of --merging, together with a ratio from another option.

    Raises:
        ToMeConfigError: a file cannot be read, or a setting does not exist.
    """
    of_files = [ToMeConfig.load(path).changed_settings() for path in options.config]
    return of_files + [parse_settings(text) for text in options.merging]


def merge_configs(options: argparse.Namespace) -> list[ToMeConfig]:
    """The config of the one way to merge that the options name, by default the defaults, at each --ratio.

    Without --ratio it has its own ratio, or the default.

    Raises:
        ToMeConfigError: as `read_methods`, or a setting or a ratio is not allowed.
    """
    methods = read_methods(options)
    settings = methods[0] if methods else {}
    if options.ratio is None:
        return [ToMeConfig(**settings)]
    return [ToMeConfig(**(settings | {"ratio": ratio})) for ratio in options.ratio]
