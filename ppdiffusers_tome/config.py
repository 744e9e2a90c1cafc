"""ToMeConfig: the settings of token merging, validated on creation."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import ParameterError, ToMeConfigError
from .method_names import DEFAULT_METHOD, DESCRIPTIONS
from .methods.rules import FLAG, TOKENS, Rule, is_integer, is_number
from .settings_file import read_settings, write_settings
from .wording import nearest, settings_in_words

if TYPE_CHECKING:
    from .methods import Method

LEVELS = (1, 2, 4, 8)
MERGE_STEPS = ("middle", "all")
LAYERS = ("attn", "crossattn", "mlp")  # each has a `merge_…` setting


@dataclass(frozen=True)
class ToMeConfig:
    """Settings of token merging. Immutable; two configs with equal fields are equal.

    `ratio`, `method`, `max_downsample` and `min_tokens` exist in all methods. The others must be left out where the
    method does not have them.

    Args:
        ratio: share of the tokens to leave out. A higher ratio is faster, and the image differs more from the plain
            one; 0 merges nothing; None is the method's own.
            With "interlace" it is the share of keys and values that attention leaves out, on average over the blocks
            that merge, from 0 to 15/16. 0.75, its own, is a good start; 0.5 is nearly the plain image.
            With "todo" it must be 1 - 1/(sx·sy), its own (0.75 with 2×2 cells), or, if sx and sy are even,
            1 - 2/(sx·sy) (0.5 with 2×2 cells), or 0.
            With "tomesd" it is from 0 to 1 - 1/(sx·sy), and 0.5 by default.
        method: how tokens merge.
            "interlace" keeps the keys and values of a part of the tokens, and of another part in each step; every
            token keeps its own query and output. It compares no tokens, and suits CPUs and GPUs.
            "todo" keeps the keys and values of one token of each cell, or at ratio 0.5 of every second token on a
            checkerboard, the same in each step.
            "tomesd" gives the results of tomesd: the most similar pairs of tokens merge into their mean, in queries,
            keys and values. It merges in UNets and their ControlNets only.
        max_downsample: deepest level that merges: 1, 2, 4 or 8. A block has level d if its tokens are latent pixels
            downsampled d times along each axis. With None, only the largest feature maps with self-attention merge:
            level 1 in Stable Diffusion, 2 in SDXL. No effect in transformers such as DiT, PixArt and SD3, which have
            one resolution.
        sx: width of a cell, in tokens, >= 1, in "todo" and "tomesd". Each sx×sy cell keeps one token (with tomesd's
            words a dst); with "todo" and ratio=1 - 2/(sx·sy) two.
        sy: height of a cell, in tokens, >= 1.
        use_rand: in "tomesd", choose the dst token of each cell at random, another one in each step, as a function of
            the timestep; otherwise it is the cell's first (top left) token.
        seed: in "tomesd", seed of the random choice of dst, 0 <= seed < 2**64. The global random states of Paddle,
            NumPy and Python are neither read nor advanced.
        merge_attn: in "tomesd", merge around self-attention (`attn1`).
        merge_crossattn: in "tomesd", merge around cross-attention (`attn2`); rarely worth it.
        merge_mlp: in "tomesd", merge around the feed-forward layer; costs the most quality. It cannot be combined with
            `enable_forward_chunking()`.
        min_tokens: grids with fewer tokens stay plain, >= 0. Small images are left alone; each pass decides it by the
            grid that it sees.
        merge_steps: in "interlace", the steps of an image in which tokens merge. "middle" keeps all tokens in the
            first steps, which decide what is in the image, and in the last ones, whose errors nothing corrects: three
            of ten steps (`methods.steps` has the noise levels). "all" merges in every step: faster, in less memory,
            and with guidance above 3 much further from the plain image.

    Raises:
        ToMeConfigError: a setting has the wrong type, is out of range or does not exist in the method, or all three
            `merge_…` are False. The message names the setting, its value and the allowed values.

    Source: names and meanings are those of tomesd (Bolya & Hoffman 2023, arXiv:2303.17604), with these differences:
    `method`, `seed` and `min_tokens` are new; a ratio above the maximum is an error, where tomesd silently lowers it;
    and `max_downsample` is None, where tomesd's default of 1 merges nothing in SDXL. "interlace" was found for this
    package. "todo" is ToDo (Smith et al. 2024, arXiv:2402.13573).

    Example:
        >>> ToMeConfig().effective_ratio, ToMeConfig(method="tomesd").effective_ratio
        (0.75, 0.5)
    """

    ratio: float | None = None
    method: str = DEFAULT_METHOD
    max_downsample: int | None = None
    sx: int = 2
    sy: int = 2
    use_rand: bool = True
    seed: int = 0
    merge_attn: bool = True
    merge_crossattn: bool = False
    merge_mlp: bool = False
    min_tokens: int = 0
    merge_steps: str = "middle"

    def __post_init__(self) -> None:
        methods = _methods()
        if not isinstance(self.method, str) or self.method not in methods:
            raise ToMeConfigError(why_no_method(self.method))
        for name, rule in RULES.items():
            value = getattr(self, name)
            if not rule.allows(value):
                raise ToMeConfigError(f"{name}={value!r:.200} is not allowed: it must be {rule.words}.")
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if value != field.default and not methods[self.method].has(name):
                having = ", ".join(other.name for other in methods.values() if other.has(name))
                raise ToMeConfigError(
                    f"{name}={value!r} is not allowed with method={self.method!r}, which has no {name}: leave it out, "
                    f"or use one of the methods that have it: {having}."
                )
        if not (self.merge_attn or self.merge_crossattn or self.merge_mlp):
            raise ToMeConfigError(
                "merge_attn, merge_crossattn and merge_mlp are all False, so nothing would merge: set one of them to "
                "True, or use remove_tome() to turn merging off."
            )
        if self.ratio is not None:
            _check_ratio(self, methods[self.method])

    @property
    def effective_ratio(self) -> float:
        """The ratio that counts: the one that was passed, or the method's own.

        It is exactly one that the cells decide if the one that was passed is that as messages round it: 0.833333 is
        5/6 with 2×3 cells.
        """
        method = _methods()[self.method]
        if self.ratio is None:
            return method.default_ratio(self.sx, self.sy)
        ratio, exact = float(self.ratio), method.allowed_ratios(self.sx, self.sy) or ()
        candidates = (method.largest_ratio(self.sx, self.sy), *exact)
        return next((one for one in candidates if abs(ratio - one) <= 5e-7), ratio)

    @property
    def takes_turns(self) -> bool:
        """Whether other timesteps choose other tokens."""
        return _methods()[self.method].takes_turns(self)

    @property
    def has_plain_steps(self) -> bool:
        """Whether the first and last steps of an image keep all tokens."""
        return _methods()[self.method].has_plain_steps(self)

    @property
    def merges_queries(self) -> bool:
        """Whether queries merge too, and not only keys and values are left out."""
        return _methods()[self.method].merges_queries

    def with_settings(self, **settings: Any) -> "ToMeConfig":
        """A config with these settings in place of its own.

        Example:
            >>> ToMeConfig(method="tomesd", sx=4).with_settings(method="todo").effective_ratio
            0.875
        """
        check_names(settings)
        return replace(self, **settings)

    def settings(self) -> dict[str, Any]:
        """All settings by name, with the ratio that counts."""
        values = {field.name: _plain(getattr(self, field.name)) for field in fields(self)}
        return {**values, "ratio": self.effective_ratio}

    def changed_settings(self) -> dict[str, Any]:
        """The ratio that counts, and the settings that differ from their defaults."""
        return {name: value for name, value in self.settings().items() if name == "ratio" or value != DEFAULTS[name]}

    def describe(self) -> str:
        """`changed_settings` as "name=value, …"; for logs and metadata."""
        return settings_in_words(self.changed_settings())

    def __repr__(self) -> str:
        return f"ToMeConfig({self.describe()})"

    def save(self, path: str | Path, **details: Any) -> None:
        """Write a settings file (JSON), which `load` and `apply_tome(config=…)` read.

        Args:
            path: of the file; an earlier one is replaced.
            details: other content of the file, such as how the settings were chosen; `load` ignores it.

        Example:
            >>> ToMeConfig(ratio=0.6).save("/tmp/tome_config.json")
            >>> ToMeConfig.load("/tmp/tome_config.json").ratio
            0.6
        """
        method = _methods()[self.method]
        settings = {name: value for name, value in self.settings().items() if method.has(name)}
        write_settings(Path(path), settings, details)

    @classmethod
    def load(cls, path: str | Path) -> "ToMeConfig":
        """Read a settings file that `save` wrote. Settings that it lacks have their defaults.

        Raises:
            ToMeConfigError: the file is missing or damaged, has another format or version, or contains a setting
                that does not exist or is not allowed. The message names the file.
        """
        settings = read_settings(Path(path))
        try:
            check_names(settings)
            return cls(**settings)
        except ToMeConfigError as error:
            raise ToMeConfigError(f"{path}: {error}") from None


DEFAULTS = {field.name: field.default for field in fields(ToMeConfig)}
SETTINGS = tuple(DEFAULTS)


# The rule of `ratio` depends on the method, see `_check_ratio`. Which methods have a setting, their entries say.
RULES = {
    "max_downsample": Rule(
        lambda value: value is None or (is_integer(value, 1) and value in LEVELS),
        "1, 2, 4 or 8, or None for the largest feature maps with attention",
    ),
    "sx": TOKENS,
    "sy": TOKENS,
    "use_rand": FLAG,
    "seed": Rule(
        lambda value: is_integer(value, 0, 2**64),
        "an int from 0 to 2**64 - 1; with each, tomesd chooses other dst in each step",
    ),
    "merge_attn": FLAG,
    "merge_crossattn": FLAG,
    "merge_mlp": FLAG,
    "min_tokens": Rule(lambda value: is_integer(value, 0), "an integer number of tokens, 0 or more"),
    "merge_steps": Rule(
        lambda value: isinstance(value, str) and value in MERGE_STEPS,
        'one of "middle", which keeps all tokens in the first and last steps of an image, and "all"',
    ),
}


def _plain(value: Any) -> Any:
    """A value of NumPy's as Python's."""
    return value.item() if isinstance(value, np.generic) else value


def _methods() -> "dict[str, Method]":
    """The methods by name. Imported late, because they import Paddle, and a command line is read without it."""
    from .methods import METHODS

    return METHODS


def why_no_method(method: Any) -> str:
    """Why this is not the name of a method, and which names there are."""
    suggested = nearest(method, DESCRIPTIONS) if isinstance(method, str) else None
    hint = f" Did you mean {suggested!r}?" if suggested else ""
    return f"method={method!r:.200} is not allowed: it must be one of {', '.join(DESCRIPTIONS)}.{hint}"


def _check_ratio(config: ToMeConfig, method: "Method") -> None:
    """Raise ParameterError if the ratio of a config is not one that its method allows with its cells."""
    value: Any = config.ratio
    if not is_number(value):
        raise ParameterError("ratio", value, "it must be a number from 0, and below 1.")
    ratio, largest = config.effective_ratio, method.largest_ratio(config.sx, config.sy)
    of_cells = f"1 - 1/(sx·sy) = {largest:g} for sx={config.sx}, sy={config.sy}"
    allowed = f"it must be a number from 0 to {of_cells if method.has('sx') else f'{largest:g}'}"
    if not 0 <= ratio <= largest:  # also rejects NaN
        remedy = "; larger sx or sy raise the maximum" if method.has("sx") and largest < ratio < 1 else ""
        hint = f" Did you mean {ratio / 100:g}, which is {ratio:g} %?" if 1 < ratio <= 100 * largest else ""
        raise ParameterError("ratio", value, f"{allowed}{remedy}.{hint}")
    exact = method.allowed_ratios(config.sx, config.sy)
    if exact is not None and ratio not in (0, *exact):
        rule = f"method={method.name!r} allows {_alternatives(exact)} with sx={config.sx}, sy={config.sy}"
        usual = method.allowed_ratios(2, 2) or exact
        remedy = "other cells allow other ratios" if usual == exact else f"{_alternatives(usual)} with 2×2 cells"
        raise ParameterError("ratio", value, f"{rule}; {remedy}.")


def _alternatives(ratios: Iterable[float]) -> str:
    """The allowed ratios, 0 last: "0.5, 0.75 or 0"."""
    return f"{', '.join(f'{ratio:g}' for ratio in ratios)} or 0"


def check_names(names: Iterable[str]) -> None:
    """Raise ToMeConfigError for a name that is not a setting; the message has the nearest one."""
    for name in names:
        if name in SETTINGS:
            continue
        suggested = nearest(str(name), SETTINGS)
        hint = f"did you mean {suggested}?" if suggested else f"use {', '.join(SETTINGS)}."
        raise ToMeConfigError(f"{name!r:.80} is not a setting: {hint}")


def controlnet_config(common: ToMeConfig, controlnet: Any) -> ToMeConfig | None:
    """The config for ControlNets, given the common one; None leaves them plain. Raises as `apply_tome` does."""
    if isinstance(controlnet, bool):
        return common if controlnet else None
    if controlnet is None:  # as a ratio it is the method's own
        raise ParameterError("controlnet", controlnet, "it must be True, False or a ratio.")
    try:
        return common.with_settings(ratio=controlnet)
    except ParameterError as error:
        rule = error.rule if isinstance(controlnet, Real) else f"it must be True, False or a ratio: {error.rule}"
        raise ParameterError("controlnet", controlnet, rule) from None
