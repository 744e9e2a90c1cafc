"""ToMeConfig: the settings of token merging, checked when they are made. No Paddle here."""

import operator
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

from .errors import ToMeConfigError

LEVELS = (1, 2, 4, 8)
LAYERS = ("attn", "crossattn", "mlp")  # what the `merge_…` settings stand for


@dataclass(frozen=True)
class ToMeConfig:
    """How tokens are merged. Immutable; two configs with equal fields are equal.

    Args:
        ratio: share of the tokens to remove, 0 <= ratio <= 1 - 1/(sx·sy). 0.5 halves them; 0 merges nothing.
        max_downsample: deepest level that merges: 1, 2, 4 or 8. A block has level d where its tokens are latent
            pixels downsampled d times along each axis. None, the default, is the shallowest level that a model has
            attention at: 1 in Stable Diffusion, 2 in SDXL. In a DiT, PixArt or SD3 transformer all tokens lie on one
            grid, which is level 1 whatever the patch size, so there this setting changes nothing.
        sx: width of a cell, in tokens, >= 1. Each sx×sy cell keeps one dst token.
        sy: height of a cell, in tokens, >= 1.
        use_rand: draw the dst token of each cell at random; otherwise it is the cell's first (top left) token.
        seed: where the random choice of dst comes from: 0 <= seed < 2**64 for the same choice in every pass, None for
            a fresh one in each. Paddle's, NumPy's and Python's own random states are never read nor advanced.
        window: side of the square windows, in tokens, within which each token looks for its dst: a multiple of sx and
            sy. None: the whole grid. The time of matching grows with the number of tokens, not with its square, and
            high ratios lose more in small windows. Not available where an export leaves height and width dynamic.
        proportional: let a merged token count in self-attention as often as the tokens that it replaces, by adding
            the logarithm of their number to the scores of its key. Nearer to the plain image in most cases.
        merge_attn: merge around self-attention (`attn1`).
        merge_crossattn: merge around cross-attention (`attn2`); seldom worth it.
        merge_mlp: merge around the feed-forward layer; costs the most quality.

    Raises:
        ToMeConfigError: a value is of the wrong type or out of range, or all three `merge_…` are False. The message
            names the argument, the value and what is allowed.

    Source: names and meanings are tomesd's (Bolya & Hoffman 2023, arXiv:2303.17604); `proportional` is from ToMe for
    ViT (Bolya et al. 2022, arXiv:2210.09461). Differs from tomesd in: `seed`, `window` and `proportional` are new, a
    ratio above the maximum is an error here, where tomesd silently lowers it, and `max_downsample` is 1 by default
    there, which merges nothing in SDXL.

    Example:
        >>> ToMeConfig(ratio=0.5).removed(4096, dst=1024)
        2048
    """

    ratio: float = 0.5
    max_downsample: int | None = None
    sx: int = 2
    sy: int = 2
    use_rand: bool = True
    seed: int | None = 0
    window: int | None = None
    proportional: bool = False
    merge_attn: bool = True
    merge_crossattn: bool = False
    merge_mlp: bool = False

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {name: _flag(name, getattr(self, name)) for name in _FLAGS}
        if not (checked["merge_attn"] or checked["merge_crossattn"] or checked["merge_mlp"]):
            raise ToMeConfigError(
                "merge_attn, merge_crossattn and merge_mlp are all False, so nothing would merge: set one of them to "
                "True, or use remove_tome() to turn merging off."
            )
        checked["sx"], checked["sy"] = _count("sx", self.sx), _count("sy", self.sy)
        checked["ratio"] = _ratio(self.ratio, checked["sx"], checked["sy"])
        checked["window"] = None if self.window is None else _window(self.window, checked["sx"], checked["sy"])
        checked["max_downsample"] = None if self.max_downsample is None else _level(self.max_downsample)
        checked["seed"] = None if self.seed is None else _seed(self.seed)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def removed(self, tokens: int, dst: int) -> int:
        """How many of a grid's tokens merge away.

        Args:
            tokens: tokens in the grid, N.
            dst: dst tokens among them: one per whole cell. 0 for a grid smaller than one cell, where nothing merges.

        Returns:
            r = ⌊N·ratio⌋, at most N - dst; as in tomesd.
        """
        return min(int(tokens * self.ratio), tokens - dst) if dst else 0

    def describe(self) -> str:
        """`ratio` and the settings that differ from their defaults, as "name=value, …", for logs and metadata."""
        shown = [f for f in fields(self) if f.name == "ratio" or getattr(self, f.name) != f.default]
        return ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in shown)


_FLAGS = ("use_rand", "proportional", "merge_attn", "merge_crossattn", "merge_mlp")


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ToMeConfigError(f"{name}={value!r} is not allowed: it must be True or False.")
    return value


def _integer(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _count(name: str, value: Any) -> int:
    number = _integer(value)
    if number is None or number < 1:
        raise ToMeConfigError(f"{name}={value!r} is not allowed: it must be a whole number of tokens, 1 or more.")
    return number


def _window(value: Any, sx: int, sy: int) -> int:
    number = _integer(value)
    if number is None or number < 1 or number % sx or number % sy:
        raise ToMeConfigError(
            f"window={value!r} is not allowed: it must be a number of tokens that is a multiple of sx={sx} and "
            f"sy={sy}, or None for the whole grid."
        )
    return number


def _level(value: Any) -> int:
    number = _integer(value)
    if number not in LEVELS:
        raise ToMeConfigError(
            f"max_downsample={value!r} is not allowed: it must be 1, 2, 4 or 8, or None for the shallowest level "
            "with attention."
        )
    return number


def _seed(value: Any) -> int:
    number = _integer(value)
    if number is None or not 0 <= number < 2**64:
        raise ToMeConfigError(
            f"seed={value!r} is not allowed: it must be an int from 0 to 2**64 - 1, or None for a fresh choice in "
            "each pass."
        )
    return number


def _ratio(value: Any, sx: int, sy: int) -> float:
    largest = 1 - 1 / (sx * sy)
    allowed = f"it must be a number from 0 to 1 - 1/(sx·sy) = {largest:g} for sx={sx}, sy={sy}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ToMeConfigError(f"ratio={value!r} is not allowed: {allowed}.")
    ratio = float(value)
    if not 0 <= ratio <= largest:  # also refuses NaN
        remedy = "; larger sx or sy raise it" if largest < ratio < 1 else ""
        raise ToMeConfigError(f"ratio={value!r} is not allowed: {allowed}{remedy}.")
    return ratio
