"""The names of ways to merge, the same in all results, tables and plots."""

from collections.abc import Collection
from dataclasses import asdict

from ..config import GRID, KV, TOMESD_SETTINGS, ToMeConfig

DEFAULT, SYMMETRIC, TOMESD = "default", "symmetric", "tomesd"
_TOMESD_CONFIG = ToMeConfig(**TOMESD_SETTINGS)
METHODS = {  # those of docs/methods.md
    DEFAULT: ToMeConfig(),
    SYMMETRIC: ToMeConfig(merge_attn=True),
    TOMESD: _TOMESD_CONFIG,
    "keys and values": ToMeConfig(merge_attn=KV),
    "ToDo": ToMeConfig(0.75, merge_attn=KV, match=GRID, use_rand=False),
}


def name_of(config: ToMeConfig, without: Collection[str] = ()) -> str:
    """A way to merge in words: the name of its method, and what differs from that method.

    Args:
        config: of which the ratio and the seed are left out.
        without: other settings that are left out.

    Example:
        >>> name_of(ToMeConfig(ratio=0.7, merge_attn=True, window=8))
        'symmetric, windows of 8'
    """
    if config.match == GRID:
        method = "ToDo"
    elif config.merge_attn is True:
        method = SYMMETRIC if config.proportional else TOMESD
    else:
        method = "keys and values" if config.merge_attn == KV else DEFAULT
    words = {
        "sx": f"{config.sx}×{config.sy} cells",
        "sy": f"{config.sx}×{config.sy} cells",
        "window": f"windows of {config.window}" if config.window else "whole grid",
        "use_rand": "random dst" if config.use_rand else "fixed dst",
        "max_downsample": f"up to level {config.max_downsample}",
        "proportional": "proportional" if config.proportional else "not proportional",
    }
    ignored = {"ratio", "seed", *without}
    if config.match == GRID:
        ignored |= {"window", "proportional"}
    values, usual = asdict(config), asdict(METHODS[method])
    differing = [name for name, value in values.items() if value != usual[name] and name not in ignored]
    return ", ".join([method, *dict.fromkeys(words.get(name, f"{name}={values[name]!r}") for name in differing)])
