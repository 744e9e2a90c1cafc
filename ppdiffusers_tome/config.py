"""ToMeConfig: the settings of token merging, validated on creation."""

import difflib
import functools
import inspect
import json
import operator
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from numbers import Real
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_type_hints

import numpy as np
from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from .errors import ParameterError, ToMeConfigError
from .files import write_file
from .methods import DEFAULT_METHOD, METHODS
from .methods.method import Method

FILE_FORMAT, FILE_VERSION = "ppdiffusers_tome.config", 2
READ_VERSIONS = (1, FILE_VERSION)  # 1: of releases before 3.0
LEVELS = (1, 2, 4, 8)
LAYERS = ("attn", "crossattn", "mlp")  # each has a `merge_…` setting


def _integer(value: Any) -> Any:
    """An integer of another type, such as NumPy's, as an int; anything else as it is."""
    try:
        return value if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return value


def _flag(value: Any) -> Any:
    """NumPy's True or False as Python's; anything else as it is."""
    return bool(value) if isinstance(value, np.bool_) else value


def _number(value: Any) -> Any:
    """A number of any type as a float; anything else as it is."""
    is_number = isinstance(value, Real) and not isinstance(value, (bool, np.bool_))
    return float(value) if is_number else value


# Errors quote the description of a field: "sx=0 is not allowed: it must be …".
Number: TypeAlias = Annotated[float, BeforeValidator(_number)]
Integer: TypeAlias = Annotated[int, BeforeValidator(_integer)]
Flag: TypeAlias = Annotated[bool, BeforeValidator(_flag), Field(description="True or False")]
Tokens: TypeAlias = Annotated[Integer, Field(ge=1, description="an integer number of tokens, 1 or more")]
Level: TypeAlias = Annotated[Literal[1, 2, 4, 8], BeforeValidator(_integer)]
WINDOW = "an integer number of tokens, 1 or more, or None for the whole grid"
LEVEL = "1, 2, 4 or 8, or None for the largest feature maps with attention"
SEED = "an int from 0 to 2**64 - 1; with each, tomesd chooses other dst in each step"
MIN_TOKENS = "an integer number of tokens, 0 or more"
METHOD = f"one of {', '.join(METHODS)}"


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid", validate_default=True))
class ToMeConfig:
    """Settings of token merging. Immutable; two configs with equal fields are equal.

    A method brings its own defaults, and a setting that is passed wins. It has not all settings: one that it lacks
    must be left out. `ratio`, `max_downsample` and `min_tokens` exist in all methods.

    Args:
        ratio: share of the tokens to leave out. A higher ratio is faster, and the image differs more from the plain
            one; 0 merges nothing.
            With "interlace" it is the share of keys and values that attention leaves out, on average over the blocks
            that merge, from 0 to 15/16. 0.75, the default, is a good start; 0.5 is nearly the plain image.
            With "todo" it must be 1 - 1/(sx·sy), its default there (0.75 with 2×2 cells), or, if sx and sy are even,
            1 - 2/(sx·sy) (0.5 with 2×2 cells), or 0.
            With the others it is from 0 to 1 - 1/(sx·sy), and 0.5 by default. With "default" it is a nominal number:
            0.5 merges 21 % of the queries and 69 % of the keys and values, which leaves attention as much work as if
            half of both merged.
        method: how tokens merge.
            "interlace", the default, keeps the keys and values of a part of the tokens, and of another part in each
            step; every token keeps its own query and output. It compares no tokens, and suits CPUs and GPUs.
            "todo" keeps the keys and values of one token of each cell, or at ratio 0.5 of every second token on a
            checkerboard, the same in each step.
            "tomesd" gives the results of tomesd: symmetric, with window=None and proportional=False.
            "default", the default before 3.0, merges the most similar pairs into their mean, keys and values more than
            queries.
            "symmetric" merges queries, keys and values alike, at `ratio`.
            "kv" merges keys and values alone, at `ratio`; every token keeps its own query and output.
        max_downsample: deepest level that merges: 1, 2, 4 or 8. A block has level d if its tokens are latent pixels
            downsampled d times along each axis. With None, the default, only the largest feature maps
            with self-attention merge: level 1 in Stable Diffusion, 2 in SDXL. No effect in transformers such as DiT,
            PixArt and SD3, which have one resolution.
        sx: width of a cell, in tokens, >= 1. Each sx×sy cell keeps one dst token; with "todo" and
            ratio=1 - 2/(sx·sy) two.
        sy: height of a cell, in tokens, >= 1.
        use_rand: choose the dst token of each cell at random; otherwise it is the cell's first (top left) token, which
            is the default of "todo". Of two dst of a cell it chooses the first, and the second is half a cell away.
            With "tomesd" the choice is another one in each step, a function of the timestep; with the others it is the
            same in each.
        seed: seed of the random choice of dst, 0 <= seed < 2**64. The global random states of Paddle, NumPy and Python
            are neither read nor advanced.
        window: side, in tokens, of the square windows in which each token looks for its dst; rounded up to a multiple
            of sx and sy, so that windows consist of cells. With a window, 16 by default, the time of matching grows
            with the number of tokens; with None, the whole grid, with its square. A window needs a height and width
            that are known when a program is exported.
        proportional: weight each merged token in self-attention by the number of tokens that it replaces: the
            logarithm of this number is added to the scores of its key. The pass raises ToMePassError if the attention
            processor is not known and does not ask for its mask. No effect where merge_attn is False.
        merge_attn: merge around self-attention (`attn1`). The text of a joint attention never merges. In the
            single-stream blocks of FLUX and HunyuanVideo, "default" and "symmetric" merge all tokens at `ratio`,
            around the MLP too, which is parallel to attention there and is most of the work.
        merge_crossattn: merge around cross-attention (`attn2`), as queries merge; rarely worth it.
        merge_mlp: merge around the feed-forward layer, as queries merge; costs the most quality. It cannot be combined
            with `enable_forward_chunking()`.
        min_tokens: grids with fewer tokens stay plain, >= 0. Small images are left alone; each pass decides it by the
            grid that it sees.

    Raises:
        ToMeConfigError: a setting does not exist, has the wrong type, is out of range or does not exist in the method,
            or all three `merge_…` are False. The message names the setting, its value and the allowed values.

    Source: names and meanings are those of tomesd (Bolya & Hoffman 2023, arXiv:2303.17604), with these differences:
    `method`, `seed`, `window`, `proportional` and `min_tokens` are new; a ratio above the maximum is an error, where
    tomesd silently lowers it; and `max_downsample` defaults to None, where tomesd's default of 1 merges nothing in
    SDXL. "interlace" was found for this package. `proportional` is the proportional attention of ToMe for ViT (Bolya
    et al. 2022, arXiv:2210.09461). "todo" is ToDo (Smith et al. 2024, arXiv:2402.13573). "default" is related to
    AsymRnR (Sun et al. 2024, arXiv:2412.11706), which removes other tokens from queries than from keys and values.

    Example:
        >>> ToMeConfig().ratio, ToMeConfig(method="tomesd").ratio
        (0.75, 0.5)
    """

    ratio: Number = 0.5
    method: Annotated[str, Field(description=METHOD)] = DEFAULT_METHOD
    max_downsample: Annotated[Level | None, Field(description=LEVEL)] = None
    sx: Tokens = 2
    sy: Tokens = 2
    use_rand: Flag = True
    seed: Annotated[Integer, Field(ge=0, lt=2**64, description=SEED)] = 0
    window: Annotated[Integer | None, Field(ge=1, description=WINDOW)] = 16
    proportional: Flag = True
    merge_attn: Flag = True
    merge_crossattn: Flag = False
    merge_mlp: Flag = False
    min_tokens: Annotated[Integer, Field(ge=0, description=MIN_TOKENS)] = 0

    @model_validator(mode="before")
    @classmethod
    def _with_defaults_of_method(cls, given: Any) -> Any:
        """The settings that were passed, with the method's defaults in place of the others."""
        if hasattr(given, "kwargs"):  # pydantic's form of a call's arguments
            names, named = [f.name for f in fields(cls)], given.kwargs or {}
            if len(given.args) > len(names):
                raise ToMeConfigError(f"ToMeConfig takes {len(names)} settings, but got {len(given.args)}.")
            positional = dict(zip(names, given.args, strict=False))
            for name in positional.keys() & named.keys():
                values = f"{positional[name]!r:.80} by position, and {named[name]!r:.80} by name"
                raise ToMeConfigError(f"{name} is passed twice: {values}. Leave one out.")
            given = {**positional, **named}
        if not isinstance(given, Mapping):
            return given
        check_names(given)
        if (attention := given.get("merge_attn")) in tuple(METHOD_OF_MERGE_ATTN):
            raise ToMeConfigError(
                f"merge_attn={attention!r} is not allowed since release 3.0: it must be True or False, and how tokens "
                f"merge is another setting. Pass method={METHOD_OF_MERGE_ATTN[attention]!r} in its place."
            )
        name = given.get("method", DEFAULT_METHOD)
        if not isinstance(name, str) or name not in METHODS:
            return given
        return {**_method_settings(METHODS[name], given), **given}

    def __post_init__(self) -> None:
        method = METHODS.get(self.method)
        if method is None:
            nearest = _nearest(self.method, METHODS)
            hint = f" Did you mean {nearest!r}?" if nearest else ""
            raise ToMeConfigError(_not_allowed("method", self.method, f"it must be {METHOD}") + hint)
        for name, value in method.fixed.items():
            if getattr(self, name) != value:
                having = ", ".join(other.name for other in METHODS.values() if name not in other.fixed)
                raise ToMeConfigError(
                    f"{name}={getattr(self, name)!r} is not allowed with method={self.method!r}, which has no {name}: "
                    f"leave it out, or use one of the methods that have it: {having}."
                )
        if not (self.merge_attn or self.merge_crossattn or self.merge_mlp):
            raise ToMeConfigError(
                "merge_attn, merge_crossattn and merge_mlp are all False, so nothing would merge: set one of them to "
                "True, or use remove_tome() to turn merging off."
            )
        object.__setattr__(self, "ratio", _checked_ratio(self, method))

    def with_settings(self, **settings: Any) -> "ToMeConfig":
        """A config with these settings in place of its own; a setting that has its default takes that of a new method.

        Example:
            >>> ToMeConfig(method="kv", sx=4).with_settings(method="todo")
            ToMeConfig(ratio=0.875, method='todo', sx=4)
        """
        own = self.changed_settings()
        if self.ratio == default_settings(self.method, sx=self.sx, sy=self.sy)["ratio"]:
            del own["ratio"]
        return ToMeConfig(**{**own, **settings})

    def describe(self) -> str:
        """`ratio` and all settings that differ from their defaults, as "name=value, …"; for logs and metadata."""
        return ", ".join(f"{name}={value!r}" for name, value in self.changed_settings().items())

    def changed_settings(self) -> dict[str, Any]:
        """`ratio`, `method` if it is not the default, and the settings that differ from the method's defaults."""
        usual = {**default_settings(self.method, sx=self.sx, sy=self.sy), "method": DEFAULT_METHOD, "sx": 2, "sy": 2}
        return {name: value for name, value in asdict(self).items() if name == "ratio" or value != usual[name]}

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
        content = {"format": FILE_FORMAT, "version": FILE_VERSION, "settings": asdict(self), **details}
        write_file(Path(path), json.dumps(content, indent=2, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "ToMeConfig":
        """Read a settings file that `save` of this or an earlier release wrote. Settings that it lacks have defaults.

        Raises:
            ToMeConfigError: the file is missing or damaged, has another format or version, or contains a setting
                that does not exist or is not allowed. The message names the file.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if not isinstance(content, dict) or content.get("format") != FILE_FORMAT:
                raise ToMeConfigError(f'it is not a settings file: it must have "format": "{FILE_FORMAT}".')
            if content.get("version") not in READ_VERSIONS:
                raise ToMeConfigError(
                    f"version {content.get('version')!r:.50} of the format cannot be read, only "
                    f"{' and '.join(map(str, READ_VERSIONS))}: write the file again with this release."
                )
            settings = content.get("settings")
            if not isinstance(settings, dict):
                raise ToMeConfigError('it has no object "settings".')
            if content["version"] == FILE_VERSION:
                settings = {"method": DEFAULT_METHOD, **settings}  # one without a method is not of 2.x
            return cls(**upgraded(settings))
        except ToMeConfigError as error:
            raise ToMeConfigError(f"{path}: {error}") from None
        except (OSError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, or not JSON
            raise ToMeConfigError(f"{path} cannot be read as a settings file: {error}") from error


def _adapt(cls: type) -> None:
    """Let the class raise ToMeConfigError in place of pydantic's errors, and show the types and defaults of a call."""
    init = cls.__init__  # type: ignore[misc]

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **settings: Any) -> None:
        try:
            init(self, *args, **settings)
        except ValidationError as error:
            raise _first_error(error) from None

    types = get_type_hints(cls)
    shown = inspect.signature(cls).parameters
    method = METHODS[DEFAULT_METHOD]
    usual = {**{name: parameter.default for name, parameter in shown.items()}, **method.defaults(2, 2), **method.fixed}
    parameters = [one.replace(annotation=types[name], default=usual[name]) for name, one in shown.items()]
    cls.__init__ = __init__  # type: ignore[misc]
    cls.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]


_adapt(ToMeConfig)
SETTINGS = tuple(f.name for f in fields(ToMeConfig))
_DESCRIPTIONS = {name: field.description for name, field in vars(ToMeConfig)["__pydantic_fields__"].items()}


def _first_error(error: ValidationError) -> ToMeConfigError:
    """The first of pydantic's errors, as an error of this package."""
    first = error.errors(include_url=False)[0]
    raised = first.get("ctx", {}).get("error")
    if isinstance(raised, ToMeConfigError):  # by this module
        return raised
    name = str(first["loc"][0]) if first["loc"] else "settings"
    if name == "ratio":
        return ParameterError(name, first["input"], "it must be a number from 0, and below 1.")
    allowed = _DESCRIPTIONS.get(name)
    return ToMeConfigError(_not_allowed(name, first["input"], f"it must be {allowed}" if allowed else first["msg"]))


def _not_allowed(name: str, value: Any, rule: str) -> str:
    return f"{name}={value!r:.200} is not allowed: {rule}."


def default_settings(method: str, **given: Any) -> dict[str, Any]:
    """All settings of a method by name, at their defaults except those given, on which some defaults depend."""
    own = {f.name: f.default for f in fields(ToMeConfig)}
    return {**own, **_method_settings(METHODS[method], given), **given, "method": method}


def _method_settings(method: Method, given: Mapping[str, Any]) -> dict[str, Any]:
    """A method's own defaults, given the settings that were passed, and the values of the settings that it lacks."""
    sides = [given.get(name, 2) for name in ("sx", "sy")]
    is_cell = all(isinstance(side, int) and side >= 1 for side in map(_integer, sides))
    return {**method.defaults(*sides if is_cell else (2, 2)), **method.fixed}


def _checked_ratio(config: ToMeConfig, method: Method) -> float:
    """The ratio of a config; exactly one that its cells decide if it is that as messages round it."""
    ratio, largest = config.ratio, method.largest_ratio(config.sx, config.sy)
    has_cells = "sx" not in method.fixed
    of_cells = f"1 - 1/(sx·sy) = {largest:g} for sx={config.sx}, sy={config.sy}"
    allowed = f"it must be a number from 0 to {of_cells if has_cells else f'{largest:g}'}"
    exact = method.allowed_ratios(config.sx, config.sy)
    ratio = next((one for one in (largest, *(exact or ())) if abs(ratio - one) <= 5e-7), ratio)
    if not 0 <= ratio <= largest:  # also rejects NaN
        remedy = "; larger sx or sy raise the maximum" if has_cells and largest < ratio < 1 else ""
        hint = f" Did you mean {ratio / 100:g}, which is {ratio:g} %?" if 1 < ratio <= 100 * largest else ""
        raise ParameterError("ratio", config.ratio, f"{allowed}{remedy}.{hint}")
    if exact is not None and ratio not in (0, *exact):
        rule = f"method={method.name!r} allows {_alternatives(exact)} with sx={config.sx}, sy={config.sy}"
        usual = method.allowed_ratios(2, 2) or exact
        remedy = "other cells allow other ratios" if usual == exact else f"{_alternatives(usual)} with 2×2 cells"
        raise ParameterError("ratio", config.ratio, f"{rule}; {remedy}.")
    return ratio


def _alternatives(ratios: Iterable[float]) -> str:
    """The allowed ratios, 0 last: "0.5, 0.75 or 0"."""
    return f"{', '.join(f'{ratio:g}' for ratio in ratios)} or 0"


# Settings of earlier releases


def check_names(names: Iterable[str]) -> None:
    """Raise ToMeConfigError for a name that is not a setting; the message has the nearest one, or what replaced it."""
    for name in names:
        if name in SETTINGS:
            continue
        if name in REPLACED:
            raise ToMeConfigError(f"{name} is not a setting since release 3.0: {REPLACED[name]}.")
        nearest = _nearest(str(name), SETTINGS)
        hint = f"did you mean {nearest}?" if nearest else f"use {', '.join(SETTINGS)}."
        raise ToMeConfigError(f"{name!r:.80} is not a setting: {hint}")


def _nearest(name: str, names: Iterable[str]) -> str | None:
    """The one of some names that was probably meant: the one that it contains, or that is written most alike."""
    lower = name.lower()
    contained = [one for one in names if f"_{one}_" in f"_{lower}_"]
    return next(iter(contained or difflib.get_close_matches(lower, list(names), 1)), None)


REPLACED = {
    "match": 'leave it out, or in place of match="grid" with merge_attn="kv" pass method="todo"',
    "blend": 'a merged token is the mean of its tokens, or with method="todo" the dst of its cell',
}
# What is written since 3.0 in place of a value of `merge_attn`.
METHOD_OF_MERGE_ATTN = {"asymmetric": "default", "kv": "kv"}


def upgraded(settings: Any) -> Any:
    """Settings that an earlier release wrote, as those of this release; others as they are.

    Raises:
        ToMeConfigError: tokens would not merge as they did.
    """
    if isinstance(settings, dict) and settings.get("seed", 0) is None and settings.get("use_rand") is False:
        settings = {**settings, "seed": 0}  # it may have been None, and chooses nothing
    if not isinstance(settings, dict) or "method" in settings:
        return settings
    settings = dict(settings)
    match, attention = settings.pop("match", "similarity"), settings.pop("merge_attn", "asymmetric")
    if "blend" in settings and (blend := settings.pop("blend")) != (0 if match == "grid" else 1):
        raise ToMeConfigError(f"blend={blend!r:.50} cannot be read: {REPLACED['blend']}.")
    is_known = isinstance(attention, bool) or attention in METHOD_OF_MERGE_ATTN
    if match not in ("similarity", "grid") or not is_known:
        raise ToMeConfigError(
            f"match={match!r:.50}, merge_attn={attention!r:.50} cannot be read: no release had them."
        )
    if match == "grid":
        if attention not in ("kv", False):
            raise ToMeConfigError(
                f'match="grid" with merge_attn={attention!r} cannot be read: since release 3.0 cells merge keys and '
                'values only. Use method="todo", or method="symmetric" to merge queries too.'
            )
        settings.pop("window", None)
        method = "todo"
    elif attention is True:
        method = "symmetric"
        if settings.get("window", 16) is None and settings.get("proportional") is False:
            method = "tomesd"
    else:
        method = METHOD_OF_MERGE_ATTN.get(attention, "default")
    own = {"ratio": 0.5, "use_rand": True} if match == "grid" else {}  # defaults that "todo" has not
    return {**own, **settings, "method": method, "merge_attn": attention is not False}


def controlnet_config(common: ToMeConfig, controlnet: Any) -> ToMeConfig | None:
    """The config for ControlNets, given the common one; None leaves them plain. Raises as `apply_tome` does."""
    if isinstance(controlnet, bool):
        return common if controlnet else None
    try:
        return common.with_settings(ratio=controlnet)
    except ParameterError as error:
        rule = error.rule if isinstance(controlnet, Real) else f"it must be True, False or a ratio: {error.rule}"
        raise ParameterError("controlnet", controlnet, rule) from None
