"""The configuration under test: what every benchmark plans, measures, and stores with its figures."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

from ppdiffusers_tome import ToMeConfig
from ppdiffusers_tome.methods import METHODS
from ppdiffusers_tome.wording import merging_in_words

PLAIN = "plain"
EAGER = "eager"
OURS, BUILT_IN = "ours", "built-in"  # values of `by`
ANOTHER_SEED = "another seed"


@dataclass(frozen=True)
class Arm:
    """One way to compute a pass or to generate an image; without arguments the plain one.

    Args:
        config: how tokens merge; None: they do not.
        by: what merges: OURS, this package; BUILT_IN, the apply_tome that ppdiffusers ships.
        attention: PLAIN, "slicing" or "xformers".
        backend: of a timed pass: EAGER, or one of `speed.cases.PROGRAMS`. A benchmark of images has one for all arms.
        steps: of an image; None: as many as the plain images.
        every: DeepCache (Ma et al. 2023, arXiv:2312.00858): the n-th steps compute everything, from the first on, and
            the others the first level.
        other_seed: the noise is another one.

    Example:
        >>> Arm(ToMeConfig(0.5, "tomesd", sx=4), steps=14).name
        '14 steps + tomesd 0.5, sx=4'
    """

    config: ToMeConfig | None = None
    by: str = OURS
    attention: str = PLAIN
    backend: str = EAGER
    steps: int | None = None
    every: int = 1
    other_seed: bool = False

    @property
    def ratio(self) -> float:
        """Share of tokens to merge; 0 if nothing merges."""
        return self.config.effective_ratio if self.config else 0.0

    @property
    def merging(self) -> str:
        """The name of the method, its ratio and other settings; empty if nothing merges."""
        return self._merging()

    @property
    def name(self) -> str:
        """What differs from the plain image, in words; the backend is left out."""
        return self._name(self.merging)

    @property
    def pass_name(self) -> str:
        """As `name`, of a timed pass, such as "interlace 0.75, eager"; without the choice of dst, equal in all."""
        return f"{self._name(self._merging(without=('use_rand',)))}, {self.backend}"

    def _merging(self, without: Collection[str] = ()) -> str:
        if self.config is None:
            return ""
        words = merging_in_words(self.config, without)
        return words if self.by == OURS else f"{words} ({self.by})"

    def _name(self, merging: str) -> str:
        steps = f"{self.steps} steps" if self.steps else ""
        cache = f"DeepCache {self.every}" if self.every > 1 else ""
        attention = "" if self.attention == PLAIN else "memory-efficient"
        seed = ANOTHER_SEED if self.other_seed else ""
        return " + ".join(filter(None, [steps, cache, merging, attention, seed])) or PLAIN

    def to_json(self) -> dict[str, Any]:
        """The fields that differ from those of the plain arm; `config` with all settings of merging."""
        given = {**vars(self), "config": self.config and self.config.settings()}
        return {field.name: given[field.name] for field in fields(self) if given[field.name] != field.default}

    @classmethod
    def from_json(cls, settings: Mapping[str, Any]) -> "Arm":
        """The arm of `to_json`."""
        config = settings.get("config")
        return cls(**{**settings, "config": config and read_config(config)})


def read_config(settings: Mapping[str, Any]) -> ToMeConfig:
    """The config of the settings in a result, some of which have the settings of all methods."""
    own = METHODS[settings["method"]].defaults()
    return ToMeConfig(**{name: value for name, value in settings.items() if name in own})
