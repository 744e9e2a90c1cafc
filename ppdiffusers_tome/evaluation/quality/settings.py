"""What is compared with plain pictures: ratios, and what the ToMe paper varies beside them."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ...config import ToMeConfig
from ...errors import ToMeConfigError

RATIOS = (0.1, 0.25, 0.5, 0.75)
ABLATIONS = ("use_rand", "max_downsample", "layers")
TOMESD = "tomesd"
LAYERS = (("merge_crossattn",), ("merge_mlp",), ("merge_crossattn", "merge_mlp"))


@dataclass(frozen=True)
class Setting:
    """One way of drawing all prompts.

    Args:
        name: unique; also the name of the pictures' folder.
        group: what it belongs to in the report: "ratio", one of ABLATIONS, or "tomesd".
        config: how tokens merge; with ratio 0 they do not.
        framework: "Paddle", or "PyTorch" for the same weights merged by tomesd.
        seed_offset: added to the seed of every prompt: other noise.
    """

    name: str
    group: str
    config: ToMeConfig
    framework: str = "Paddle"
    seed_offset: int = 0


PLAIN = Setting("plain", "plain", ToMeConfig(ratio=0))
# Plain pictures of the same prompts from other noise: how far apart two samples of one model are.
OTHER_SEEDS = Setting("other-seeds", "plain", ToMeConfig(ratio=0), seed_offset=2**31)


def study(
    ratios: Sequence[float],
    ablations: Collection[str] = ABLATIONS,
    ablation_ratio: float = 0.5,
    levels: Sequence[int] = (1,),
    tomesd: Sequence[float] = (),
) -> list[Setting]:
    """The settings of an evaluation, each differing in one thing from the defaults at some ratio.

    Args:
        ratios: above 0; each with the defaults.
        ablations: some of ABLATIONS: "use_rand" (every ratio with dst fixed), "max_downsample" (every deeper level,
            at `ablation_ratio`) and "layers" (around cross-attention, the feed-forward layer and both beside
            self-attention, at `ablation_ratio`).
        ablation_ratio: of the two latter.
        levels: at which levels the model has self-attention, the shallowest first.
        tomesd: ratios to draw with tomesd on PyTorch, by its defaults. (With fixed dst it computes the same as we do,
            which the tests hold to its golden vectors.)

    Raises:
        ToMeConfigError: a ratio is 0 or too large, given twice, or there is no such ablation.

    Source: the design choices that Bolya & Hoffman 2023, arXiv:2303.17604, vary in their section 4.
    """
    for name in ablations:
        if name not in ABLATIONS:
            raise ToMeConfigError(f"ablation {name!r} is not allowed: it must be one of {', '.join(ABLATIONS)}.")
    for ratio in (*ratios, ablation_ratio, *tomesd):
        if ToMeConfig(ratio=ratio).ratio == 0:
            raise ToMeConfigError(f"ratio={ratio!r} is not allowed: it must be above 0, for plain is always drawn.")
    found = [Setting(f"{ratio:g}", "ratio", ToMeConfig(ratio=ratio)) for ratio in ratios]
    base = ToMeConfig(ratio=ablation_ratio)
    if "max_downsample" in ablations:
        found += [
            Setting(f"{base.ratio:g}-down{level}", "max_downsample", replace(base, max_downsample=level))
            for level in levels[1:]
        ]
    if "layers" in ablations:
        for more in LAYERS:
            label = "-".join([f"{base.ratio:g}", *(name.removeprefix("merge_") for name in more)])
            found.append(Setting(label, "layers", replace(base, **dict.fromkeys(more, True))))
    if "use_rand" in ablations:
        fixed = [ToMeConfig(ratio=ratio, use_rand=False) for ratio in ratios]
        found += [Setting(f"{config.ratio:g}-fixed", "use_rand", config) for config in fixed]
    found += [Setting(f"{ratio:g}-tomesd", TOMESD, ToMeConfig(ratio=ratio), "PyTorch") for ratio in tomesd]
    names = [setting.name for setting in found]
    for name in names:
        if names.count(name) > 1:
            raise ToMeConfigError(f"ratio {name} is given twice: give each once.")
    return found
