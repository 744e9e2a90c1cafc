"""What became slower from one speed result to others, judged by ratios within each run.

    python benchmarks/compare_speed.py OLD.json NEW.json

The exit status is 1 if an arm of the package became slower. Several new files count as one run.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from ppdiffusers_tome import ToMeConfigError
from ppdiffusers_tome.evaluation.markdown import change
from ppdiffusers_tome.evaluation.speed.cases import EAGER, ERROR, MEASURED, NOT_MEASURED, OUT_OF_MEMORY, PLAIN
from ppdiffusers_tome.evaluation.speed.frame import CASE, UNMERGED, read_frame, rounds, rows_with, spread

ARM = [*CASE, "arm", "backend", "attention", "ratio", "max_downsample", "method"]  # equal if the arm is measured again
HEADINGS = {
    "slower": "Became slower",
    "faster": "Became faster",
    "within the noise": "Changed, but within the noise (the quartiles overlap)",
    "no reference": "Not compared, because a run has no plain arm",
    "appeared": "Appeared",
    "vanished": "Vanished",
}


def compare(old: Path, new: Sequence[Path], threshold: float = 0.05) -> tuple[str, bool]:
    """What became slower or faster, appeared or vanished from one speed result to others.

    The time of an arm is taken as a share of plain's within rounds, and that of plain in the predictor as a share of
    plain in eager, because seconds of two runs on a shared machine cannot be compared.

    Args:
        old, new: files that `bench` wrote; an arm has vanished if none of the new ones has it.
        threshold: smallest relative change that counts, above 0; it is noise if the quartiles of the two runs overlap.

    Returns:
        The text, and whether an arm of this package became slower or can no longer be computed. Those that
        benchmarks/speed.py adds are in the text, but do not count.

    Raises:
        ToMeConfigError: the threshold is not above 0, or as `read_frame`.
    """
    if not threshold > 0:
        raise ToMeConfigError(f"threshold={threshold!r} is not allowed: it must be above 0.")
    before, after = (_with_shares(read_frame(files)[0]) for files in ([old], new))
    is_same_machine = {*before["machine"]} == {*after["machine"]}
    arms = after.merge(before, on=ARM, how="outer", suffixes=("", "_old")).sort_values(["order", "order_old"])
    verdicts = [_judge(arm, threshold, is_same_machine) for arm in arms.to_dict("records")]
    arms["verdict"], arms["text"] = zip(*verdicts, strict=True)
    counts = arms[["is_ours", "is_ours_old"]].eq(True).any(axis=1)
    remarks = (counts | (arms["verdict"] != "slower")).map({True: "", False: " (does not count)"})
    texts = "  " + arms["label"].fillna(arms["label_old"]) + ": " + arms["text"] + remarks
    lines = [f"Old: {run}" for run in before["run"].unique()] + [f"New: {run}" for run in after["run"].unique()]
    if not is_same_machine:
        lines.append("Machine, threads or versions differ: only ratios within each run are compared.")
    for verdict, heading in HEADINGS.items():
        listed = texts[arms["verdict"] == verdict]
        lines += ["", f"{heading}:", *listed] if len(listed) else []
    same = (arms["verdict"] == "the same").sum()
    lines += ["", f"Within {threshold:.0%} of the old result: {same} of {len(arms)} arms."]
    return "\n".join(lines), bool((counts & (arms["verdict"] == "slower")).any())


def _with_shares(frame: pd.DataFrame) -> pd.DataFrame:
    backends = frame["backend"].mask(frame["arm"] == PLAIN, EAGER)
    reference = rows_with(frame, arm=PLAIN, backend=backends, **UNMERGED)
    frame = frame.join(spread("share", rounds(frame) / rounds(reference)))
    label, run = frame["case_name"] + ": " + frame["name"], frame["commit"] + ", " + frame["command"]
    return frame.assign(label=label, run=run, order=range(len(frame)))


def _judge(arm: dict[str, Any], threshold: float, is_same_machine: bool) -> tuple[str, str]:
    """A verdict and its reason."""
    was, status = arm["status_old"], arm["status"]
    if pd.isna(was):
        return "appeared", status
    if pd.isna(status):
        return "vanished", f"was {was}"
    if was != MEASURED or status != MEASURED:
        text = f"was {was}, now {status}" + (f" ({arm['reason']})" if arm["reason"] else "")
        if was == MEASURED:
            return "slower" if status in (OUT_OF_MEMORY, ERROR) else "vanished", text
        return "the same" if status != MEASURED else "appeared" if was == NOT_MEASURED else "faster", text
    if (arm["arm"], arm["backend"]) == (PLAIN, EAGER):
        return "the same", "the reference"
    ratio = arm["share"] / arm["share_old"]
    if pd.isna(ratio):
        return "no reference", "its time against plain is not known"
    reference = "eager plain" if arm["arm"] == PLAIN else "plain"
    before, after = (
        f"{arm[f'share{run}']:.3f} [{arm[f'share_low{run}']:.3f}–{arm[f'share_high{run}']:.3f}]"
        for run in ("_old", "")
    )
    text = f"{before} → {after} of {reference}'s time ({change(ratio)})"
    if is_same_machine:
        text += f"; {arm['time_old']:.4g} s → {arm['time']:.4g} s"
    if abs(ratio - 1) <= threshold:
        return "the same", text
    if arm["share_low"] <= arm["share_high_old"] and arm["share_low_old"] <= arm["share_high"]:
        return "within the noise", text
    return "slower" if ratio > 1 else "faster", text


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path, help="a result of bench")
    parser.add_argument("new", type=Path, nargs="+", help="later results")
    parser.add_argument("--threshold", type=float, default=0.05, help="smallest change (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        text, is_slower = compare(options.old, options.new, options.threshold)
    except ToMeConfigError as error:
        parser.error(str(error))
    print(text)
    return int(is_slower)


if __name__ == "__main__":
    sys.exit(main())
