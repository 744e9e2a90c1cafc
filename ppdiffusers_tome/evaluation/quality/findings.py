"""What a quality result says: medians and quartiles, which settings form a line, and a summary that claims no more."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

PAIRS = {"psnr": "PSNR, dB", "ssim": "SSIM", "perceptual": "perceptual distance (ST-LPIPS)"}
OTHER_SEEDS, BLURRED = "plain, other seeds", "plain, blurred"
TO_OTHERS, TO_REAL = "to plain, other seeds", "to real"
# What each set distance can be read against: its noise floor comes first.
CALIBRATED_BY = {TO_OTHERS: (OTHER_SEEDS, BLURRED), TO_REAL: ("plain against real", "real halves", "real, blurred")}
RANDOM, FIXED, TOMESD = "random dst", "fixed dst", "tomesd on PyTorch"

Setting = dict[str, Any]


def quartiles(values: Sequence[float | None]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile; None counts as infinite, as the PSNR of equal pictures is.

    Linear between neighbours, as NumPy's default, but an infinite neighbour makes the result infinite, never NaN.
    """
    ordered = sorted(math.inf if value is None else value for value in values)

    def at(share: float) -> float:
        below, part = divmod(share * (len(ordered) - 1), 1)
        low, high = ordered[int(below)], ordered[min(int(below) + 1, len(ordered) - 1)]
        return low if part == 0 or low == high else low + (high - low) * part

    return at(0.25), at(0.5), at(0.75)


def median(setting: Setting, measure: str) -> float:
    """Of a setting, or of a calibration, over its pictures."""
    return quartiles(setting["pairs"][measure])[1]


def lines(result: dict[str, Any]) -> dict[str, list[Setting]]:
    """The settings that differ in the ratio alone, by ratio: random dst, fixed dst, tomesd's; where there are any."""
    found: dict[str, list[Setting]] = {RANDOM: [], FIXED: [], TOMESD: []}
    for setting in result["settings"]:
        if setting["group"] == "ratio":
            found[RANDOM].append(setting)
        elif setting["group"] == "use_rand" and not setting["config"]["use_rand"]:
            found[FIXED].append(setting)
        elif setting["group"] == "tomesd":
            found[TOMESD].append(setting)
    return {name: sorted(each, key=ratio_of) for name, each in found.items() if each}


def ratio_of(setting: Setting) -> float:
    """The share of the tokens that merges away."""
    return float(setting["config"]["ratio"])


def at_ratio(settings: Sequence[Setting], ratio: float) -> Setting | None:
    """The first setting with that ratio, None where there is none."""
    return next((each for each in settings if math.isclose(ratio_of(each), ratio)), None)


def studied_ratio(result: dict[str, Any]) -> float | None:
    """The ratio of the ablations; where there are none, the measured one nearest to 0.5. None where there is none."""
    ablated = [ratio_of(each) for each in result["settings"] if each["group"] in ("max_downsample", "layers")]
    ratios = ablated or [ratio_of(each) for each in result["settings"] if each["group"] == "ratio"]
    return min(ratios, key=lambda ratio: abs(ratio - 0.5), default=None)


def default_setting(result: dict[str, Any]) -> Setting | None:
    """The setting with everything at its default whose ratio is nearest to that of the ablations."""
    ratio = studied_ratio(result)
    random = lines(result).get(RANDOM, [])
    return min(random, key=lambda each: abs(ratio_of(each) - (ratio or 0)), default=None)


def is_within_floor(setting: Setting, result: dict[str, Any], to: str = TO_OTHERS) -> bool | None:
    """Whether the setting's KID is no further from the noise floor than two standard deviations of the two estimates.

    The floor is what plain pictures themselves have. None where either was not measured.
    """
    floor = ((result["calibration"].get(CALIBRATED_BY[to][0]) or {}).get("set") or {}).get("kid")
    kid = (setting["set"].get(to) or {}).get("kid")
    if floor is None or kid is None:
        return None
    return kid["mean"] - floor["mean"] <= 2 * math.hypot(kid["std"], floor["std"])


def time_share(setting: Setting) -> float | None:
    """A picture's time over a plain one's of the same framework; below 1 is faster. None where not measured."""
    seconds = setting.get("seconds")
    return seconds["picture"] / seconds["plain"] if seconds else None


def summarize(result: dict[str, Any]) -> list[str]:
    """At most ten sentences, computed from the result; what it does not hold is not spoken of."""
    by_line = lines(result)
    random = by_line.get(RANDOM, [])
    said = []
    if default := default_setting(result):
        ratio = ratio_of(default)
        low, middle, high = quartiles(default["pairs"]["perceptual"])
        said.append(
            f"At ratio {ratio:g} the median image is at a perceptual distance of {middle:.4f} (quartiles {low:.4f} to "
            f"{high:.4f}) from the plain one of the same noise; PSNR {median(default, 'psnr'):.1f} dB, SSIM "
            f"{median(default, 'ssim'):.3f}."
        )
        if seeds := (result["calibration"].get(OTHER_SEEDS) or {}).get("pairs"):
            other = quartiles(seeds["perceptual"])[1]
            said.append(
                f"Another seed of the same prompt is at {other:.4f}: merging {ratio:.0%} of the tokens moves an image "
                f"{middle / other:.0%} as far as another seed does."
            )
    if len(random) > 1:
        said.append(_growth(random))
    said += _floor(random, result)
    if at_both := [(r, f) for f in by_line.get(FIXED, []) if (r := at_ratio(random, ratio_of(f)))]:
        nearer = ", ".join(f"{ratio_of(r):g}: {_closer(f, r):.0%}" for r, f in at_both)
        said.append(f"Pictures in which fixed dst stay nearer to plain than random dst, by ratio: {nearer}.")
    if default and (cost := _layers(result, default)):
        said.append(cost)
    if default and (share := time_share(default)):
        verb = "less" if share < 1 else "more"
        at = ratio_of(default)
        said.append(f"An image at {at:g} took {abs(1 - share):.0%} {verb} time than a plain one, on this machine.")
    if pairs := [(t, r) for t in by_line.get(TOMESD, []) if (r := at_ratio(random, ratio_of(t)))]:
        each = ", ".join(
            f"{ratio_of(t):g}: {median(t, 'perceptual'):.4f} against {median(r, 'perceptual'):.4f}" for t, r in pairs
        )
        said.append(f"tomesd on PyTorch with the same weights, perceptual distance against ours, by ratio: {each}.")
    said.append(
        "Distance from the plain picture is not quality: PSNR, SSIM and the perceptual distance call another picture "
        "of the same prompt wrong. Whether pictures are worse is what the set distances ask."
    )
    return said


def _growth(random: list[Setting]) -> str:
    """How surely a higher ratio is further from plain, picture by picture."""
    steps = [(1 - _closer(high, low), f"{ratio_of(low):g} to {ratio_of(high):g}") for low, high in pairwise(random)]
    least, where = min(steps)
    first, last = random[0], random[-1]
    return (
        f"The median perceptual distance goes from {median(first, 'perceptual'):.4f} at ratio {ratio_of(first):g} to "
        f"{median(last, 'perceptual'):.4f} at {ratio_of(last):g}; from one ratio to the next at least {least:.0%} "
        f"of the pictures come no nearer to plain (fewest from {where})."
    )


def _closer(a: Setting, b: Setting) -> float:
    """The share of the pictures that are nearer to plain under a than under b."""
    both = list(zip(a["pairs"]["perceptual"], b["pairs"]["perceptual"], strict=True))
    return sum(x < y for x, y in both) / len(both)


def _floor(random: list[Setting], result: dict[str, Any]) -> list[str]:
    """What KID can tell apart from plain pictures with other seeds, and what it cannot."""
    verdicts = [(f"{ratio_of(each):g}", is_within_floor(each, result)) for each in random]
    within = [ratio for ratio, verdict in verdicts if verdict is True]
    beyond = [ratio for ratio, verdict in verdicts if verdict is False]
    if not within and not beyond:
        return []
    said = f"KID, {len(result['prompts'])} pictures against plain ones with other seeds: "
    if not within:
        return [f"{said}every ratio is beyond the noise floor, that is, what plain pictures themselves have."]
    said += f"ratio {', '.join(within)} cannot be told from plain pictures (noise floor and two standard deviations)"
    said += f"; {', '.join(beyond)} can." if beyond else "."
    return [f"{said} Differences below the floor cannot rank ratios." if len(within) > 1 else said]


def _layers(result: dict[str, Any], default: Setting) -> str:
    """What the layers and levels that may merge too add at the ratio of the ablations."""
    others = [each for each in result["settings"] if each["group"] in ("layers", "max_downsample")]
    found = [(median(each, "perceptual"), each["name"]) for each in others]
    if not found:
        return ""
    most, least = max(found), min(found)
    return (
        f"Among other layers and levels at {studied_ratio(result):g}, {least[1]} is nearest to plain ({least[0]:.4f}) "
        f"and {most[1]} furthest ({most[0]:.4f}); the default at {ratio_of(default):g} has "
        f"{median(default, 'perceptual'):.4f}."
    )
