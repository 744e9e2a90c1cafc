"""ToMeConfig: the settings of token merging, validated on creation. This module does not import Paddle."""

import json
import operator
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, fields, replace
from numbers import Real
from pathlib import Path
from typing import Any, TypeAlias

from .errors import ParameterError, ToMeConfigError
from .files import write_file

LEVELS = (1, 2, 4, 8)
MAX_SEED = 2**64 - 1
_ROUNDING = 1e-9  # tolerance: larger than the rounding error of N·ratio, for millions of tokens
ASYMMETRIC, KV = "asymmetric", "kv"  # of merge_attn: keys and values merge further than queries, or only they merge
# With ASYMMETRIC, keys and values keep share ** _KEYS_POWER of the tokens, and queries share ** (2 - _KEYS_POWER). The
# product of the two is the same as if both kept the share.
_KEYS_POWER = 5 / 3
SIMILARITY, GRID = "similarity", "grid"  # of match
# Settings with which tokens merge as in tomesd.
TOMESD_SETTINGS: dict[str, Any] = {
    "window": None,
    "proportional": False,
    "match": SIMILARITY,
    "merge_attn": True,
    "min_tokens": 0,
}
FILE_FORMAT, FILE_VERSION = "ppdiffusers_tome.config", 1
LAYERS = ("attn", "crossattn", "mlp")  # each has a `merge_…` setting


@dataclass(frozen=True)
class ToMeConfig:
    """Settings of token merging. Immutable; two configs with equal fields are equal.

    Args:
        ratio: share of the tokens to remove, 0 <= ratio <= 1 - 1/(sx·sy); see merge_attn. 0.5, the default, is a good
            start; 0 merges nothing.
        max_downsample: deepest level that merges: 1, 2, 4 or 8. A block has level d if its tokens are latent pixels
            downsampled d times along each axis. With None, the default, only the largest feature maps
            with self-attention merge: level 1 in Stable Diffusion, 2 in SDXL. In a DiT, PixArt or SD3 transformer all
            tokens lie on one grid, which is level 1 whatever the patch size, so this setting has no effect there.
        sx: width of a cell, in tokens, >= 1. Each sx×sy cell keeps one dst token.
        sy: height of a cell, in tokens, >= 1.
        use_rand: choose the dst token of each cell at random; otherwise it is the cell's first (top left) token.
        seed: seed of the random choice of dst: 0 <= seed < 2**64 for the same choice in every pass, None for a new
            one in each. The global random states of Paddle, NumPy and Python are neither read nor advanced.
        window: side, in tokens, of the square windows in which each token looks for its dst; rounded up to a multiple
            of sx and sy, so that windows consist of cells. With a window, 16 by default, the time of matching grows
            with the number of tokens; with None, the whole grid, with its square. A window needs a height and width
            that are known when a program is exported.
        proportional: weight each merged token in self-attention by the number of tokens that it replaces: the
            logarithm of this number is added to the scores of its key. Raises in the pass if the attention processor
            takes neither a mask nor more channels. Has no effect where merge_attn is False. With False, window=None
            and merge_attn=True, tokens merge as in tomesd.
        match: "similarity" merges the most similar pairs into their mean; "grid" keeps the dst of every sx×sy cell as
            it is, without comparing tokens, so `ratio` must be 1 - 1/(sx·sy), 0.75 by default, or 0. "grid" needs a
            height and width that are known when a program is exported, and ignores `window`.
        merge_attn: True merges around self-attention (`attn1`), queries, keys and values alike; "asymmetric" merges
            keys and values further than queries, and attention is as much work: at ratio 0.5 queries merge at 0.21,
            keys and values at 0.69; other layers merge as queries do. "kv" merges only the tokens from which keys and
            values are computed, at `ratio`, so that every token keeps its own query and output; False merges nothing
            there. The text of a joint attention never merges. In the single-stream blocks of FLUX and HunyuanVideo,
            True and "asymmetric" merge all tokens at `ratio`, around the MLP too, which is parallel to attention there
            and is most of the work.
        merge_crossattn: merge around cross-attention (`attn2`); rarely worth it.
        merge_mlp: merge around the feed-forward layer; costs the most quality. It cannot be combined with
            `enable_forward_chunking()`.
        min_tokens: grids with fewer tokens stay plain, >= 0. Small images are left alone; each pass decides it by the
            grid that it sees.

    Raises:
        ToMeConfigError: a value has the wrong type or is out of range, or all three `merge_…` are False. The
            message names the argument, its value and the allowed values.

    Source: names and meanings are those of tomesd (Bolya & Hoffman 2023, arXiv:2303.17604), with these differences:
    `seed`, `window`, `proportional`, `match`, `min_tokens`, "asymmetric" and "kv" are new; a ratio
    above the maximum is an error, where tomesd silently lowers it; and `max_downsample` defaults to None, where
    tomesd's default of 1 merges nothing in SDXL. `proportional` is the proportional attention of ToMe for ViT (Bolya
    et al. 2022, arXiv:2210.09461). merge_attn="kv" with match="grid" is ToDo (Smith et al. 2024, arXiv:2402.13573),
    with the first token of each cell if use_rand=False; "asymmetric" is named after AsymRnR (Sun et al. 2024,
    arXiv:2412.11706), which removes other tokens from queries than from keys and values.

    Example:
        >>> ToMeConfig(ratio=0.5, merge_attn=True).removed(4096, dst=1024)
        2048
    """

    ratio: float = 0.5
    max_downsample: int | None = None
    sx: int = 2
    sy: int = 2
    use_rand: bool = True
    seed: int | None = 0
    window: int | None = 16
    proportional: bool = True
    match: str = SIMILARITY
    merge_attn: bool | str = ASYMMETRIC
    merge_crossattn: bool = False
    merge_mlp: bool = False
    min_tokens: int = 0

    def __post_init__(self) -> None:
        for name, (convert, is_allowed, allowed) in _RULES.items():
            value = getattr(self, name)
            if value is None and "None" in allowed:
                continue
            converted = convert(value)
            if converted is None or not is_allowed(converted):
                raise ToMeConfigError(f"{name}={value!r} is not allowed: it must be {allowed}.")
            object.__setattr__(self, name, converted)
        if not (self.merge_attn or self.merge_crossattn or self.merge_mlp):
            raise ToMeConfigError(
                "merge_attn, merge_crossattn and merge_mlp are all False, so nothing would merge: set one of them to "
                "True, or use remove_tome() to turn merging off."
            )
        object.__setattr__(self, "ratio", _ratio(self.ratio, self.sx, self.sy, self.match == GRID))

    def removed(self, tokens: int, dst: int, *, keys: bool = False) -> int:
        """Number of tokens of a grid that are merged away, r.

        Args:
            tokens: tokens in the grid, N.
            dst: dst tokens among them: one per complete cell; 0 in a grid smaller than one cell, where nothing merges.
            keys: count those merged away from the keys and values of self-attention, which merge_attn="asymmetric"
                merges further than other tokens.

        Returns:
            r = ⌊N·ratio⌋, at most N - dst; N - dst with match="grid"; 0 below min_tokens. Where floating point puts
            N·ratio just below the integer that it is, as 100·0.29, tomesd merges one token less. With
            merge_attn="asymmetric", `ratio` is that of `attention_ratios`.
        """
        ratio = self.attention_ratios[keys]
        if tokens < self.min_tokens:
            return 0
        if self.match == GRID and ratio and dst:
            return tokens - dst
        return min(int(tokens * ratio + _ROUNDING), tokens - dst) if dst else 0

    @property
    def attention_ratios(self) -> tuple[float, float]:
        """The ratio of queries, and that of keys and values.

        They differ with merge_attn="asymmetric": attention multiplies as many pairs of queries and keys as it does if
        both merge at `ratio`. Keys and values keep the fifth power of the share that queries keep, or as much as cells
        let them.

        Example:
            >>> queries, keys = ToMeConfig(ratio=0.5, merge_attn="asymmetric").attention_ratios
            >>> round(queries, 3), round(keys, 3), round((1 - queries) * (1 - keys), 3)
            (0.206, 0.685, 0.25)
        """
        ratio = self.ratio
        if self.merge_attn != ASYMMETRIC:
            return ratio, ratio
        keys = min(1 - (1 - ratio) ** _KEYS_POWER, 1 - 1 / (self.sx * self.sy))
        return 1 - (1 - ratio) ** 2 / (1 - keys) if keys else 0.0, keys

    def symmetric(self) -> "ToMeConfig":
        """Return the config with merge_attn=True in place of "asymmetric"."""
        return replace(self, merge_attn=True) if self.merge_attn == ASYMMETRIC else self

    def describe(self) -> str:
        """`ratio` and all settings that differ from their defaults, as "name=value, …"; for logs and metadata."""
        return ", ".join(f"{name}={value!r}" for name, value in self.changed_settings().items())

    def changed_settings(self) -> dict[str, Any]:
        """`ratio` and all settings that differ from their defaults, by name."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {f.name: values[f.name] for f in fields(self) if f.name == "ratio" or values[f.name] != f.default}

    @property
    def method(self) -> str:
        """How tokens merge in words, without `ratio` and `seed`: see `method_name`."""
        return method_name(self)

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
        """Read a settings file that `save` wrote. Settings that it lacks have their defaults.

        Raises:
            ToMeConfigError: the file is missing or damaged, has another format or version, or contains a setting
                that does not exist or is not allowed. The message names the file.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if not isinstance(content, dict) or content.get("format") != FILE_FORMAT:
                raise ToMeConfigError(f'it is not a settings file: it must have "format": "{FILE_FORMAT}".')
            if content.get("version") != FILE_VERSION:
                raise ToMeConfigError(
                    f"version {content.get('version')!r:.50} of the format cannot be read, only {FILE_VERSION}: write "
                    "the file again with this release."
                )
            settings, names = content.get("settings"), [f.name for f in fields(cls)]
            if not isinstance(settings, dict):
                raise ToMeConfigError('it has no object "settings".')
            settings = without_blend(settings)
            if unknown := sorted(settings.keys() - names):
                raise ToMeConfigError(f"{unknown[0]!r:.80} is not a setting: use {', '.join(names)}.")
            return cls(**settings)
        except ToMeConfigError as error:
            raise ToMeConfigError(f"{path}: {error}") from None
        except (OSError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, or not JSON
            raise ToMeConfigError(f"{path} cannot be read as a settings file: {error}") from error


def without_blend(settings: Any) -> Any:
    """Settings that a release before 3.0 wrote, without `blend`.

    Raises:
        ToMeConfigError: tokens would not merge as they did.
    """
    if not isinstance(settings, dict) or "blend" not in settings:
        return settings
    blend = settings["blend"]
    if blend != (0 if settings.get("match") == GRID else 1):
        raise ToMeConfigError(
            f"blend={blend!r:.50} is not a setting any more: since release 3.0 a merged token is the mean of its "
            'tokens, or with match="grid" the dst of its cell. Remove it.'
        )
    return {name: value for name, value in settings.items() if name != "blend"}


def parse_settings(text: str) -> dict[str, Any]:
    """The settings in a text such as "window=16,proportional,ratio=0.7", as arguments of `ToMeConfig`.

    A name without a value is True; "none" is None. `ToMeConfig` checks the values, because further settings, such as a
    ratio, may join these.

    Raises:
        ToMeConfigError: a name is not a setting.
    """
    settings: dict[str, Any] = {}
    names = [f.name for f in fields(ToMeConfig)]
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in names or name in settings:
            raise ToMeConfigError(f"{text!r:.200}: {name!r} is not a setting or is repeated: use {', '.join(names)}.")
        settings[name] = _WORDS[value.lower()] if value.lower() in _WORDS else _number(value)
    return settings


_WORDS = {"": True, "true": True, "false": False, "none": None}


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _integer(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


_Rule: TypeAlias = tuple[Callable[[Any], Any], Callable[[Any], bool], str]
_EITHER: _Rule = (_flag, lambda value: True, "True or False")
_CELL: _Rule = (_integer, lambda number: number >= 1, "an integer number of tokens, 1 or more")
# For each setting except `ratio`: a conversion that returns None for a value of another type, a check of the converted
# value, and the text of allowed values for error messages.
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(("use_rand", "proportional", "merge_crossattn", "merge_mlp"), _EITHER),
    "merge_attn": (
        lambda value: value if isinstance(value, (bool, str)) else None,
        lambda value: value in (True, False, ASYMMETRIC, KV),
        f"True or False, or {ASYMMETRIC!r} or {KV!r}",
    ),
    "match": (lambda value: value, lambda value: value in (SIMILARITY, GRID), f"{SIMILARITY!r} or {GRID!r}"),
    **dict.fromkeys(("sx", "sy"), _CELL),
    "min_tokens": (_integer, lambda number: number >= 0, "an integer number of tokens, 0 or more"),
    "window": (*_CELL[:2], f"{_CELL[2]}, or None for the whole grid"),
    "max_downsample": (
        _integer,
        lambda level: level in LEVELS,
        "1, 2, 4 or 8, or None for the largest feature maps with attention",
    ),
    "seed": (
        _integer,
        lambda seed: 0 <= seed <= MAX_SEED,
        "an int from 0 to 2**64 - 1, or None for a new choice in each pass",
    ),
}


def _ratio(value: Any, sx: int, sy: int, is_grid: bool) -> float:
    largest = 1 - 1 / (sx * sy)
    allowed = f"it must be a number from 0 to 1 - 1/(sx·sy) = {largest:g} for sx={sx}, sy={sy}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ParameterError("ratio", value, f"{allowed}.")
    ratio = float(value)
    if abs(ratio - largest) <= 5e-7:  # as rounded in the message
        ratio = largest
    if not 0 <= ratio <= largest:  # also rejects NaN
        remedy = "; larger sx or sy raise the maximum" if largest < ratio < 1 else ""
        raise ParameterError("ratio", value, f"{allowed}{remedy}.")
    if is_grid and ratio not in (0, largest):
        rule = f"with match={GRID!r}, which keeps one token of each cell, it must be 1 - 1/(sx·sy) = {largest:g} for"
        raise ParameterError("ratio", value, f"{rule} sx={sx}, sy={sy}, or 0.")
    return ratio


DEFAULT, SYMMETRIC, TOMESD, KEYS_AND_VALUES, TODO = "default", "symmetric", "tomesd", "keys and values", "ToDo"
METHODS = {  # those of docs/methods.md, at a ratio that they allow
    DEFAULT: ToMeConfig(),
    SYMMETRIC: ToMeConfig(merge_attn=True),
    TOMESD: ToMeConfig(**TOMESD_SETTINGS),
    KEYS_AND_VALUES: ToMeConfig(merge_attn=KV),
    TODO: ToMeConfig(0.75, merge_attn=KV, match=GRID, use_rand=False),
}


def method_name(config: ToMeConfig, without: Collection[str] = ()) -> str:
    """A way to merge in words: the name of its method in METHODS, and what differs from that method.

    Args:
        config: its ratio and seed are left out.
        without: other settings to leave out.

    Example:
        >>> method_name(ToMeConfig(ratio=0.7, merge_attn=True, window=8))
        'symmetric, windows of 8'
    """
    if config.match == GRID:
        method = TODO
    elif config.merge_attn is True:
        method = SYMMETRIC if config.proportional else TOMESD
    else:
        method = KEYS_AND_VALUES if config.merge_attn == KV else DEFAULT
    cells = f"{config.sx}×{config.sy} cells"
    words = {
        "sx": cells,
        "sy": cells,
        "window": f"windows of {config.window}" if config.window else "whole grid",
        "use_rand": "random dst" if config.use_rand else "fixed dst",
        "max_downsample": f"up to level {config.max_downsample}",
        "proportional": "proportional" if config.proportional else "not proportional",
        "merge_attn": {True: SYMMETRIC, ASYMMETRIC: ASYMMETRIC}.get(config.merge_attn, "not around self-attention"),
        "min_tokens": f"from {config.min_tokens} tokens",
    }
    ignored = {"ratio", "seed", *without}
    if config.match == GRID:
        ignored.add("window")
    values, usual = asdict(config), asdict(METHODS[method])
    differing = [name for name, value in values.items() if value != usual[name] and name not in ignored]
    return ", ".join([method, *dict.fromkeys(words.get(name, f"{name}={values[name]!r}") for name in differing)])


def controlnet_config(common: ToMeConfig, controlnet: Any) -> ToMeConfig | None:
    """The config for ControlNets, given the common one; None leaves them plain. Raises as `apply_tome` does."""
    if isinstance(controlnet, bool):
        return common if controlnet else None
    try:
        return replace(common, ratio=controlnet)
    except ParameterError as error:
        rule = error.rule if isinstance(controlnet, Real) else f"it must be True, False or a ratio: {error.rule}"
        raise ParameterError("controlnet", controlnet, rule) from None
