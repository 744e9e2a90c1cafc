"""Names, ways to merge and command lines in words, for messages, results and reports."""

import difflib
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

PROGRAM = "python -m ppdiffusers_tome"


class Merging(Protocol):
    """What this module reads of a `ToMeConfig`, whose module imports it."""

    @property
    def method(self) -> str: ...

    @property
    def effective_ratio(self) -> float: ...

    def changed_settings(self) -> dict[str, Any]: ...


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Which of `names` was probably meant: a name that `name` contains, or that is spelled most alike; None: none."""
    lower = name.lower()
    contained = [known for known in names if f"_{known}_" in f"_{lower}_"]
    return next(iter(contained or difflib.get_close_matches(lower, list(names), 1)), None)


def command_line(arguments: Sequence[str], program: str = PROGRAM) -> str:
    """A program with these arguments, as results and messages write it."""
    return f"{program} {shlex.join(arguments)}"


def merging_in_words(merging: Merging, without: Collection[str] = ()) -> str:
    """The name of the method, the ratio, and the other settings that differ from their defaults.

    Args:
        merging: the config; two different configs have different words.
        without: settings to leave out.

    Example:
        >>> merging_in_words(ToMeConfig(ratio=0.75, method="todo", min_tokens=64))
        'todo 0.75, min_tokens=64'
    """
    return _in_words(f"{merging.method} {merging.effective_ratio:.15g}", merging, without)


def method_in_words(merging: Merging) -> str:
    """The name of the method, and the settings that differ from their defaults, without the ratio.

    Example:
        >>> method_in_words(ToMeConfig(ratio=0.75, method="todo", min_tokens=64))
        'todo, min_tokens=64'
    """
    return _in_words(merging.method, merging)


def controlnet_in_words(ratio: float, words: str) -> str:
    """What follows the words of a UNet with a ControlNet that merges, in these words, at a ratio of its own."""
    return f"; ControlNet at ratio {ratio:g}: {words}"


def settings_in_words(settings: Mapping[str, Any]) -> str:
    """Settings as "name=value, …"."""
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())


def _in_words(first: str, merging: Merging, without: Collection[str] = ()) -> str:
    ignored = {"ratio", "method", *without}
    further = {name: value for name, value in merging.changed_settings().items() if name not in ignored}
    return f"{first}, {settings_in_words(further)}" if further else first
