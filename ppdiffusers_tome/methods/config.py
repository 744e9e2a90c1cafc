"""`ToMeConfig`: the settings of a method, validated on creation, and what a method must define."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

import numpy as np
from typing_extensions import Self, Unpack

from ..errors import ParameterError, ToMeConfigError
from ..grid import Grid
from ..method_names import DEFAULT_METHOD, DESCRIPTIONS, MethodSettings
from ..settings_file import read_settings, write_settings
from ..wording import nearest, settings_in_words
from .rules import Rule, is_integer, is_number, rules_of

if TYPE_CHECKING:  # settings are read, and constants are computed, without Paddle
    import paddle

    from .plan import Choice, Turn

LEVELS = (1, 2, 4, 8)
LEVEL = Rule(
    lambda value: value is None or (is_integer(value, 1) and value in LEVELS),
    "1, 2, 4 or 8, or None for the largest feature maps with attention",
)
GRID_TOKENS = Rule(lambda value: is_integer(value, 0), "an integer number of tokens, 0 or more")


@dataclass(frozen=True, init=False)
class ToMeConfig:
    """How to merge: a method and its settings. Immutable; two configs with equal fields are equal.

    Each method is a subclass with settings of its own, such as `Interlace`, `Todo` and `Tomesd` of
    `ppdiffusers_tome.methods`. `ToMeConfig(…)` makes an object of the class that `method` names:
    `ToMeConfig(method="todo", sx=4)` is `Todo(sx=4)`.

    Args:
        ratio: share of the tokens to leave out. A higher ratio is faster, and the image differs more from the plain
            image; 0 merges nothing; None is the method's own. The class of the method says which ratios there are.
        method: how tokens merge: "interlace", the default, or a different name of `METHODS`.
        max_downsample: deepest level that merges: 1, 2, 4 or 8. A block has level d if its tokens are latent pixels
            downsampled d times along each axis. With None, only the largest feature maps with self-attention merge:
            level 1 in Stable Diffusion, 2 in SDXL. No effect in transformers such as DiT, PixArt and SD3, which have
            one resolution.
        min_tokens: grids with fewer tokens stay plain, >= 0. Small images are left alone; each pass decides it by the
            grid that it sees.
        settings: those of the method.

    Raises:
        ToMeConfigError: a setting has the wrong type, is out of range or does not exist in the method. The message
            names the setting, its value and the allowed values.

    Source: names and meanings are those of tomesd (Bolya & Hoffman 2023, arXiv:2303.17604), with these differences:
    `method` and `min_tokens` are new; a ratio above the maximum is an error, where tomesd silently lowers it; and
    `max_downsample` is None, where tomesd's default of 1 merges nothing in SDXL.

    Example:
        >>> ToMeConfig().effective_ratio, ToMeConfig(method="tomesd").effective_ratio
        (0.75, 0.5)
    """

    by_name: ClassVar[Mapping[str, type["ToMeConfig"]]]  # `METHODS`, which the package assigns
    # Whether layers run on the tokens that remain, and give their results to those that merged into them; otherwise
    # every token keeps its query and its output, and only keys and values are fewer.
    merges_queries: ClassVar[bool] = False

    ratio: float | None = None
    method: str = DEFAULT_METHOD
    _: KW_ONLY
    max_downsample: Annotated[int | None, LEVEL] = None
    min_tokens: Annotated[int, GRID_TOKENS] = 0

    def __new__(
        cls, /, ratio: float | None = None, method: str = DEFAULT_METHOD, **settings: Unpack[MethodSettings]
    ) -> Self:
        """An object of this class, or of that of the method; `__init__` is that of its class."""
        if cls is not ToMeConfig:
            return super().__new__(cls)
        if not isinstance(method, str) or method not in cls.by_name:
            raise ToMeConfigError(why_no_method(method))
        chosen = cls.by_name[method]
        chosen._check_own(settings)
        return cast(Self, super().__new__(chosen))

    def __post_init__(self) -> None:
        if self.method != type(self).method:
            raise ToMeConfigError(
                f"method={self.method!r:.200} is not allowed in {type(self).__name__}: leave it out, or make "
                "ToMeConfig(method=…) or config.with_settings(method=…)."
            )
        for name, rule in rules_of(type(self)).items():
            value = getattr(self, name)
            if not rule.allows(value):
                raise ToMeConfigError(f"{name}={value!r:.200} is not allowed: it must be {rule.words}.")
        if self.ratio is not None:
            self._check_ratio(self.ratio)

    @classmethod
    def _check_own(cls, settings: Mapping[str, Any]) -> None:
        """Raise ToMeConfigError for a setting that the method does not have."""
        check_names(settings)
        for name, value in settings.items():
            if name not in cls.defaults():
                having = ", ".join(method for method, config in cls.by_name.items() if name in config.defaults())
                raise ToMeConfigError(
                    f"{name}={value!r:.200} is not allowed with method={cls.method!r}, which has no {name}: leave it "
                    f"out, or use one of the methods that have it: {having}."
                )

    def _check_ratio(self, value: Any) -> None:
        if not is_number(value):
            raise ParameterError("ratio", value, "it must be a number from 0, and below 1.")
        ratio, largest, exact = self.effective_ratio, self.largest_ratio, self.allowed_ratios
        if not 0 <= ratio <= largest or (exact is not None and ratio not in (0, *exact)):  # also rejects NaN
            hint = f" Did you mean {ratio / 100:g}, which is {ratio:g} %?" if 1 < ratio <= 100 * largest else ""
            raise ParameterError("ratio", value, f"{self.ratio_rule}.{hint}")

    # What a method defines. From here on everything counts the tokens that remain ("kept").

    @property
    def default_ratio(self) -> float:
        """The ratio if none is passed."""
        raise NotImplementedError

    @property
    def largest_ratio(self) -> float:
        """The largest ratio that is allowed."""
        raise NotImplementedError

    @property
    def allowed_ratios(self) -> tuple[float, ...] | None:
        """The ratios, ascending, that are allowed beside 0; None if all up to the largest are."""
        return None

    @property
    def ratio_rule(self) -> str:
        """Which ratios are allowed, in words."""
        if self.allowed_ratios is not None:
            return f"method={self.method!r} allows {ratios_in_words(self.allowed_ratios)}"
        return f"it must be a number from 0 to {self.largest_ratio:g}"

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers of a block around which tokens merge: some of "attn", "crossattn" and "mlp"."""
        return ("attn",)

    @property
    def takes_turns(self) -> bool:
        """Whether different timesteps choose different tokens."""
        return False

    @property
    def has_plain_steps(self) -> bool:
        """Whether the first and last steps of an image, those of `methods.steps`, keep all tokens."""
        return False

    def kept_shares(self, count: int, last: int | None) -> Sequence[float]:
        """The share of the tokens that each merging block of a denoiser keeps.

        Args:
            count: number of blocks that merge.
            last: number of the block that runs last among the up blocks of a UNet; None if there is none.
        """
        return [1 - self.effective_ratio] * count

    def count_kept(self, grid: Grid, share: float) -> int:
        """How many tokens of a grid, or of each frame of a video, remain in a block that keeps this share (< 1)."""
        raise NotImplementedError

    def constants(self, grid: Grid, kept: int, block: int) -> Any:
        """What the choices on a grid have in common, in NumPy's int64: constants of a program.

        Of a method that leaves tokens out it is the table of those that remain in each turn, [T, K] with T = `TURNS`
        or 1, ascending. A method that merges queries returns a NamedTuple of arrays.

        Args:
            grid: tokens along each axis.
            kept: number of tokens that remain, fewer than those of the grid.
            block: number of the block in its denoiser; blocks may make different choices.
        """
        raise NotImplementedError

    def choose(
        self,
        metric: "paddle.Tensor",  # [B, N, C] floating point; the frames of a video are rows
        constants: Any,  # as tensors
        kept: int,
        turn: "Turn",
    ) -> "Choice":
        """Choose the tokens that remain, by default those of the table. No gradient flows through the choice."""
        from .plan import Choice  # here, because settings are read without Paddle

        return Choice(turn.rows_of(constants))

    def pairs_compared(self, grid: Grid) -> int:
        """Number of pairs of tokens whose similarity is computed; 0 if none is."""
        return 0

    # The settings

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The settings of the method, each with its default."""
        return {field.name: field.default for field in fields(cls)}

    @property
    def effective_ratio(self) -> float:
        """The ratio that counts: that of the argument, or the method's own.

        A ratio within 5e-7 of a ratio that the cells define counts as that ratio, because messages round: 0.833333 is
        5/6.
        """
        if self.ratio is None:
            return self.default_ratio
        ratio, exact = float(self.ratio), (self.largest_ratio, *(self.allowed_ratios or ()))
        return next((defined for defined in exact if abs(ratio - defined) <= 5e-7), ratio)

    def with_settings(self, /, **settings: Any) -> "ToMeConfig":
        """A config with these settings in place of its own, also of a different method.

        Example:
            >>> ToMeConfig(method="tomesd", sx=4).with_settings(method="todo").effective_ratio
            0.875
        """
        own = {
            name: getattr(self, name) for name, default in self.defaults().items() if getattr(self, name) != default
        }
        return ToMeConfig(**{**own, "method": self.method, **settings})

    def for_controlnet(self, controlnet: Any) -> "ToMeConfig | None":
        """The config of ControlNets, by the argument of `apply_tome`; None leaves them plain.

        Raises:
            ParameterError: it is neither True, False nor an allowed ratio.
        """
        if isinstance(controlnet, bool):
            return self if controlnet else None
        if controlnet is None:  # as a ratio it is the method's own
            raise ParameterError("controlnet", controlnet, "it must be True, False or a ratio.")
        try:
            return self.with_settings(ratio=controlnet)
        except ParameterError as error:
            rule = error.rule if isinstance(controlnet, Real) else f"it must be True, False or a ratio: {error.rule}"
            raise ParameterError("controlnet", controlnet, rule) from None

    def settings(self) -> dict[str, Any]:
        """All settings by name, with the ratio that counts."""
        values = {name: _plain(getattr(self, name)) for name in self.defaults()}
        return {**values, "ratio": self.effective_ratio}

    def changed_settings(self) -> dict[str, Any]:
        """The ratio that counts, and the settings that differ from their defaults."""
        usual = {**self.defaults(), "ratio": None, "method": DEFAULT_METHOD}
        return {name: value for name, value in self.settings().items() if value != usual[name]}

    def describe(self) -> str:
        """`changed_settings` as "name=value, …"; for logs and metadata."""
        return settings_in_words(self.changed_settings())

    def save(self, path: str | Path, **details: Any) -> None:
        """Write a settings file (JSON), which `load` and `apply_tome(config=…)` read.

        Args:
            path: of the file; an earlier file is replaced.
            details: further content of the file, such as how the settings were chosen; `load` ignores it.

        Example:
            >>> ToMeConfig(ratio=0.6).save("/tmp/tome_config.json")
            >>> ToMeConfig.load("/tmp/tome_config.json").ratio
            0.6
        """
        write_settings(Path(path), self.settings(), details)

    @staticmethod
    def load(path: str | Path) -> "ToMeConfig":
        """Read a settings file that `save` wrote. Settings that it lacks have their defaults.

        Raises:
            ToMeConfigError: the file is missing or damaged, has a wrong format or version, or contains a setting
                that does not exist or is not allowed. The message names the file.
        """
        settings = read_settings(Path(path))
        try:
            return ToMeConfig(**settings)
        except ToMeConfigError as error:
            raise ToMeConfigError(f"{path}: {error}") from None


def _plain(value: Any) -> Any:
    """A value of NumPy's as Python's."""
    return value.item() if isinstance(value, np.generic) else value


def ratios_in_words(ratios: Iterable[float]) -> str:
    """The allowed ratios, 0 last: "0.5, 0.75 or 0"."""
    return f"{', '.join(f'{ratio:g}' for ratio in ratios)} or 0"


def why_no_method(method: Any) -> str:
    """Why this is not the name of a method, and which names there are."""
    suggested = nearest(method, DESCRIPTIONS) if isinstance(method, str) else None
    hint = f" Did you mean {suggested!r}?" if suggested else ""
    return f"method={method!r:.200} is not allowed: it must be one of {', '.join(DESCRIPTIONS)}.{hint}"


def check_names(names: Iterable[str]) -> None:
    """Raise ToMeConfigError for a name that is not a setting of any method; the message has the nearest setting."""
    known = list(dict.fromkeys(name for method in ToMeConfig.by_name.values() for name in method.defaults()))
    for name in names:
        if name not in known:
            suggested = nearest(str(name), known)
            hint = f"did you mean {suggested}?" if suggested else f"use {', '.join(known)}."
            raise ToMeConfigError(f"{name!r:.80} is not a setting: {hint}")
