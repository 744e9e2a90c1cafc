"""A config in words, for summaries, pages and reports."""

from collections.abc import Collection

from .config import ToMeConfig


def method_in_words(config: ToMeConfig) -> str:
    """The name of a config's method, and what differs from the defaults, without ratio and seed.

    Example:
        >>> method_in_words(ToMeConfig(ratio=0.7, method="tomesd", use_rand=False))
        'tomesd, fixed dst'
    """
    cells = f"{config.sx}x{config.sy} cells"  # ASCII, as the summary
    words = {
        "sx": cells,
        "sy": cells,
        "use_rand": "fixed dst",
        "max_downsample": f"up to level {config.max_downsample}",
        "merge_attn": "not around self-attention",
        "min_tokens": f"from {config.min_tokens} tokens",
    }
    differing = {name: v for name, v in config.changed_settings().items() if name not in ("ratio", "seed", "method")}
    return ", ".join(
        [config.method, *dict.fromkeys(words.get(name, f"{name}={value!r}") for name, value in differing.items())]
    )


def merging_in_words(config: ToMeConfig, without: Collection[str] = ()) -> str:
    """The name of a config's method, its ratio, and the other settings that differ from the defaults.

    Args:
        config: two different configs have different words.
        without: settings to leave out.

    Example:
        >>> merging_in_words(ToMeConfig(ratio=0.7, method="tomesd", seed=8))
        'tomesd 0.7, seed=8'
    """
    ignored = {"ratio", "method", *without}
    others = [f"{name}={value!r}" for name, value in config.changed_settings().items() if name not in ignored]
    return ", ".join([f"{config.method} {config.effective_ratio:.15g}", *others])
