"""The configuration under test: what every benchmark plans, measures, and stores with its figures."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ppdiffusers_tome.config import ToMeConfig, upgraded
from ppdiffusers_tome.wording import merging_in_words

PLAIN = "plain"
EAGER = "eager"
OURS, BUILT_IN, LIMIT, PYTORCH = "ours", "built-in", "limit", "PyTorch"  # values of `by`
ANOTHER_SEED = "another seed"


@dataclass(frozen=True)
class Arm:
    """One way to compute a pass or to generate an image; without arguments the plain one.

    Args:
        config: how tokens merge; None: they do not.
        by: what merges: OURS, this package; BUILT_IN, the apply_tome that ppdiffusers ships; LIMIT, a slice that cuts
            as many tokens (free_merge.py); PYTORCH, tomesd itself in diffusers.
        attention: PLAIN, "slicing" or "xformers".
        backend: of a timed pass: EAGER, or one of `speed.cases.PROGRAMS`. A benchmark of images has one for all arms.
        steps: of an image; None: as many as the plain images.
        every: DeepCache (Ma et al. 2023, arXiv:2312.00858): the n-th steps compute everything, from the first on, and
            the others the first level.
        other_seed: the noise is another one.

    Example:
        >>> Arm(ToMeConfig(0.7, "default", sx=4), steps=14).name
        '14 steps + default 0.7, sx=4'
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
        return self.config.ratio if self.config else 0.0

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
        """As `name`, of a timed pass, such as "default 0.5, eager". The choice of dst, equal in all, is left out."""
        return f"{self._name(self._merging(without=('use_rand',)))}, {self.backend}"

    def _merging(self, without: Collection[str] = ()) -> str:
        if self.config is None:
            return ""
        # A slice has neither windows nor weights.
        words = merging_in_words(self.config, {*without, *(("window", "proportional") if self.by == LIMIT else ())})
        return words if self.by == OURS else f"{words} ({self.by})"

    def _name(self, merging: str) -> str:
        steps = f"{self.steps} steps" if self.steps else ""
        cache = f"DeepCache {self.every}" if self.every > 1 else ""
        attention = "" if self.attention == PLAIN else "memory-efficient"
        seed = ANOTHER_SEED if self.other_seed else ""
        return " + ".join(filter(None, [steps, cache, merging, attention, seed])) or PLAIN

    def to_json(self) -> dict[str, Any]:
        """The fields that differ from those of the plain arm; `config` with all settings of merging."""
        usual = {field.name: field.default for field in fields(self)}
        return {name: value for name, value in asdict(self).items() if value != usual[name]}

    @classmethod
    def from_json(cls, settings: Mapping[str, Any]) -> "Arm":
        """The arm of `to_json`, also with a config that a release before 3.0 wrote."""
        config = settings.get("config")
        return cls(**{**settings, "config": config and ToMeConfig(**upgraded(config))})
