"""A config in words, for summaries, pages and reports."""

from collections.abc import Collection
from dataclasses import asdict

from .config import ToMeConfig, default_settings


def method_in_words(config: ToMeConfig) -> str:
    """The name of a config's method, and what differs from the method's defaults, without ratio and seed.

    Example:
        >>> method_in_words(ToMeConfig(ratio=0.7, method="symmetric", window=8))
        'symmetric, windows of 8'
    """
    cells = f"{config.sx}x{config.sy} cells"  # ASCII, as the summary
    words = {
        "sx": cells,
        "sy": cells,
        "window": f"windows of {config.window}" if config.window else "whole grid",
        "use_rand": "random dst" if config.use_rand else "fixed dst",
        "max_downsample": f"up to level {config.max_downsample}",
        "proportional": "proportional" if config.proportional else "not proportional",
        "merge_attn": "not around self-attention",
        "min_tokens": f"from {config.min_tokens} tokens",
    }
    values, usual = asdict(config), default_settings(config.method)
    differing = [name for name, value in values.items() if value != usual[name] and name not in ("ratio", "seed")]
    return ", ".join(
        [config.method, *dict.fromkeys(words.get(name, f"{name}={values[name]!r}") for name in differing)]
    )


def merging_in_words(config: ToMeConfig, without: Collection[str] = ()) -> str:
    """The name of a config's method, its ratio, and the other settings that differ from the method's defaults.

    Args:
        config: two different configs have different words.
        without: settings to leave out.

    Example:
        >>> merging_in_words(ToMeConfig(ratio=0.7, method="symmetric", window=8))
        'symmetric 0.7, window=8'
    """
    ignored = {"ratio", "method", *without}
    others = [f"{name}={value!r}" for name, value in config.changed_settings().items() if name not in ignored]
    return ", ".join([f"{config.method} {config.ratio:.15g}", *others])
