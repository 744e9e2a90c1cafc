"""Options of the command line for the settings of token merging, except the ratio."""

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..config import ASYMMETRIC, GRID, KV, SIMILARITY, ToMeConfig

NAMES = tuple(field.name for field in fields(ToMeConfig) if field.name != "ratio")
_MERGE_ATTN: dict[str, bool | str] = {
    "true": True,
    "false": False,
    **{name: name for name in (ASYMMETRIC, KV)},
}


def add_merging(group: argparse.ArgumentParser | argparse._ArgumentGroup, help: str) -> None:
    """Add --merging: ways to merge, which `config.parse_settings` reads."""
    example = "window=16,proportional merge_attn=kv,match=grid,ratio=0.75 …"
    group.add_argument("--merging", nargs="+", default=[], metavar="SETTINGS", help=f"{help}: {example}")


def add_merge_options(command: argparse.ArgumentParser) -> None:
    """Add the options that `merge_configs` reads, except --ratio."""
    option, defaults = command.add_argument_group("token merging").add_argument, ToMeConfig()
    option("--config", type=Path, help="settings file, which ToMeConfig.save writes; other options replace its values")

    def default(name: str, text: str | None = None) -> dict[str, Any]:
        """An option that is not given is absent, so that `ToMeConfig` alone decides; only the help names defaults."""
        return {"default": argparse.SUPPRESS, "dest": name} | ({} if text is None else {"help": text})

    def shown(name: str, none: str = "none") -> str:
        value = getattr(defaults, name)
        return f"(default: {none if value is None else str(value).lower()})"

    largest = shown("max_downsample", "only the largest feature maps with self-attention")
    option("--max-downsample", type=int, **default("max_downsample", f"deepest level that merges {largest}"))
    option("--sx", type=int, **default("sx", f"width of a cell, in tokens {shown('sx')}"))
    option("--sy", type=int, **default("sy", f"height of a cell, in tokens {shown('sy')}"))
    option("--seed", type=int, **default("seed", f"seed of the random dst tokens, which are fixed {shown('seed')}"))
    option("--no-rand", action="store_false", **default("use_rand", "dst is the first token of each cell"))
    window = f"side, in tokens, of the windows to match in; none for the whole grid {shown('window')}"
    option("--window", type=_int_or_none, metavar="TOKENS|none", **default("window", window))
    weight = "weight merged tokens by the number of tokens that they replace"
    # argparse itself would add "(default: ==SUPPRESS==)" to the help of Python 3.12 and older.
    option("--proportional", action="store_true", **default("proportional", f"{weight} {shown('proportional')}"))
    option("--no-proportional", action="store_false", **default("proportional", "give every merged token weight 1"))
    match = f"merge the most similar pairs, or every cell; {GRID} needs --ratio 0.75 with 2×2 cells {shown('match')}"
    option("--match", choices=(SIMILARITY, GRID), **default("match", match))
    blend = f"share of the mean in a merged token, from 0, its dst token, to 1 {shown('blend')}"
    option("--blend", type=float, **default("blend", blend))
    values = f"{ASYMMETRIC}: keys and values further than queries, {KV}: only they"
    attn = f"merge around self-attention; {values} {shown('merge_attn')}"
    option("--merge-attn", type=_merge_attn, metavar="|".join(_MERGE_ATTN), **default("merge_attn", attn))
    option("--merge-crossattn", action="store_true", **default("merge_crossattn", "merge around cross-attention too"))
    option("--merge-mlp", action="store_true", **default("merge_mlp", "merge around feed-forward layers too"))
    smallest = f"grids with fewer tokens stay plain: small images are left alone {shown('min_tokens')}"
    option("--min-tokens", type=int, **default("min_tokens", smallest))


def merge_configs(options: argparse.Namespace) -> list[ToMeConfig]:
    """A config for each --ratio: the settings of --config, replaced by those that were given as options.

    Raises:
        ToMeConfigError: the file cannot be read, or a setting is not allowed.
    """
    settings = {} if options.config is None else vars(ToMeConfig.load(options.config))
    settings |= {name: getattr(options, name) for name in NAMES if hasattr(options, name)}
    ratios = [settings.get("ratio", 0.5)] if options.ratio is None else options.ratio
    return [ToMeConfig(**{**settings, "ratio": ratio}) for ratio in ratios]


def _int_or_none(text: str) -> int | None:
    return None if text.lower() == "none" else int(text)


def _merge_attn(text: str) -> bool | str:
    if text.lower() not in _MERGE_ATTN:
        raise argparse.ArgumentTypeError(f"{text!r} must be {', '.join(_MERGE_ATTN)}")
    return _MERGE_ATTN[text.lower()]
