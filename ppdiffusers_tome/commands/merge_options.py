"""The options of the command line that name ways to merge: --merging as text, --config as settings files."""

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..config import ToMeConfig, parse_settings
from .image_options import naming_options

FLAGS = ("proportional", "merge_crossattn", "merge_mlp")  # settings that were options of 2.x without a value
SETTINGS = [field.name for field in fields(ToMeConfig) if field.name not in ("ratio", "use_rand")]
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


class _RemovedOption(argparse.Action):
    """An option of an earlier release, whose error names what replaced it."""

    def __init__(self, instead: str, **settings: Any) -> None:
        super().__init__(nargs="?", help=argparse.SUPPRESS, **settings)
        self._instead = instead

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any, option: str | None = None
    ) -> None:
        parser.error(f"{option} is not an option since release 3.0: {self._instead.format(value=value or 'VALUE')}")


def add_removed_options(command: argparse.ArgumentParser) -> None:
    """Add the options of 2.x for single settings, which --merging has replaced."""
    for name in SETTINGS:
        write = f"write --merging {name}" + ("={value}" if name not in FLAGS else "")
        command.add_argument("--" + name.replace("_", "-"), action=_RemovedOption, instead=write)
    for option, setting in (("--no-rand", "use_rand=false"), ("--no-proportional", "proportional=false")):
        command.add_argument(option, action=_RemovedOption, instead=f"write --merging {setting}")
    mean = "leave it out, a merged token is the mean of its tokens"
    command.add_argument("--blend", action=_RemovedOption, instead=mean)


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
    with naming_options():
        return [ToMeConfig(**(settings | {"ratio": ratio})) for ratio in options.ratio]
