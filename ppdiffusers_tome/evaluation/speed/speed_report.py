"""The report on speed and memory: a page of tables and plots."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from ..markdown import NOT_MEASURED, change, link, number, speed_up, table
from ..plotting import save_figure
from .cases import (
    ARM_NAMES,
    BOTH,
    BUILT_IN,
    EAGER,
    ERROR,
    LIMIT,
    MEASURED,
    MEMORY_EFFICIENT,
    OUT_OF_MEMORY,
    PLAIN,
    PREDICTOR,
    PYTORCH,
    TOME,
)
from .frame import CASE, medians, nearest, partners, read_frame
from .speed_plots import TARGET, eager_against_predictor, speed_up_by_size, time_above_limit, time_and_memory_by_ratio

COLUMNS = (PLAIN, TOME, MEMORY_EFFICIENT, BOTH, LIMIT)  # of the tables by size, batch and ratio
SUMMARY = [  # arm, column of its speed-up, and the comparison in words
    (TOME, "faster_than_plain", "ToMe over plain"),
    (TOME, "faster_than_efficient", "ToMe over memory-efficient attention"),
    (BOTH, "faster_than_plain", "ToMe + memory-efficient attention over plain"),
    (BOTH, "faster_than_efficient", "ToMe + memory-efficient attention over memory-efficient attention"),
    (TOME, "faster_than_built_in", "ToMe over ppdiffusers' built-in ToMe"),
    (TOME, "faster_than_pytorch", "ToMe over tomesd on PyTorch"),
    (TOME, "faster_than_eager", "ToMe in the predictor over ToMe in eager"),
]
CASE_CELLS = ["size, px", "batch", "memory limit"]  # what differs between the cases of a section
SPEED_UP = partial(speed_up, with_quartiles=True)
GROUP = ["model", "scope", "dtype", "steps", "guidance_scale", "machine"]  # what the cases of a section share
PACKAGES = [
    "paddlepaddle",
    "paddlepaddle-gpu",
    "ppdiffusers",
    "ppdiffusers_tome",
    "numpy",
    "torch",
    "diffusers",
    "tomesd",
]
PUBLISHED = "published_figures.md"
INTRODUCTION = """\
A *case* is one model at one image size and batch. Its *arms* compute it in different ways: *plain* is the model as it
is, *ToMe 0.5* merges away half of the tokens before attention, *memory-efficient* is xformers on a GPU and sliced
attention on a CPU, *ToMe + memory-efficient* is both. *Eager* runs the model layer by layer, *predictor* runs a
program exported from it. A speed-up of 1.50× means 1.5 times as fast; an arm below 1× is slower."""
HOW_TO_READ = """\
All arms of a case take turns in every round. A speed-up is the median of the ratios within rounds, with quartiles in
square brackets. Percentages in parentheses are changes of time or memory against plain in the same backend: −40 % is
40 % less, +40 % is 40 % more. The *free-merge limit* computes on as few tokens, but neither chooses nor moves any: its
output is wrong, and no merging can be faster. Memory is the peak of Paddle's own counter in one pass, with weights.
The machine is shared and noisy: compare ratios, not seconds. Merging is lossy: `evaluate` measures the changes."""


def write_report(files: Sequence[Path], output: Path) -> str:
    """Write `speed.md` and its plots into a folder, which is made if it is missing.

    Args:
        files: result files; those of other kinds are listed on the page and not used.
        output: the folder.

    Returns:
        The text of `speed.md`.

    Raises:
        ToMeConfigError: a file cannot be read, none is a speed result, or as `make_frame`; nothing is written.
    """
    frame, skipped = read_frame(files)
    frame = _with_cells(frame)
    lines = ["# Speed and memory", "", INTRODUCTION, "", *_summary(frame), HOW_TO_READ, ""]
    if (output / PUBLISHED).exists():
        lines += [f"Figures published by other projects, on other hardware: [{PUBLISHED}]({PUBLISHED}).", ""]
    if skipped:
        names = ", ".join(f"{_file_link(file, output)} ({kind})" for file, kind in skipped)
        lines += [f"Not in this report, because they are not speed results: {names}.", ""]
    figures: dict[str, Figure] = {}
    for index, (title, arms) in enumerate(_groups(frame), start=1):
        plots = _plots(arms, index)
        figures |= plots
        lines += [f"## {title}", "", *_sources(arms, output), "", *_section(arms)]
        for name, figure in plots.items():
            lines += [f"![{figure.get_suptitle()}]({name})", ""]
        lines += ["<details><summary>Every figure: time, memory, multiply-accumulates, parity</summary>", ""]
        lines += [*_every_figure(arms), "", "</details>", ""]
    text = "\n".join(lines).rstrip() + "\n"
    output.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        save_figure(figure, output / name)
    (output / "speed.md").write_text(text, encoding="utf-8")
    return text


def _with_cells(frame: pd.DataFrame) -> pd.DataFrame:
    """With columns of text for tables: time and peak memory, alone and with their changes against plain."""
    failures = frame["status"].map({OUT_OF_MEMORY: "OOM", ERROR: "error"}).fillna(NOT_MEASURED)
    time = _text(medians(frame["time"]), number).fillna(failures)
    memory = _text(frame["peak_memory_bytes"] / 1e9, number).fillna(failures)
    speed_ups = medians(frame["faster_than_plain"])
    changes = frame["memory_over_plain"].mask(frame["arm"] == PLAIN)
    texts = {
        "size, px": frame["size"],
        "memory limit": _text(frame["memory_limit_gb"], "{:g} GB".format).fillna(NOT_MEASURED),
        "time_cell": time,
        "memory_cell": memory,
        "time_and_change": time + _text(1 / speed_ups, lambda ratio: f" ({change(ratio)})").fillna(""),
        "time_and_speed_up": time + _text(speed_ups, " ({:.2f}×)".format).fillna(""),
        "memory_and_change": memory + _text(changes, lambda ratio: f" ({change(ratio)})").fillna(""),
    }
    return frame.assign(**texts)


def _text(values: pd.Series, write: Callable[[Any], str]) -> pd.Series:
    return values.map(write, na_action="ignore").astype(object)


def _table(cells: pd.DataFrame) -> list[str]:
    """A Markdown table whose first columns are the frame's index."""
    cells = cells.reset_index().fillna(NOT_MEASURED).astype(str)
    return table(list(cells), cells.to_numpy().tolist())


def _summary(frame: pd.DataFrame) -> list[str]:
    """Sentences and tables computed from all results, on gains and losses alike."""
    blocks = [[f"- {sentence}" for sentence in _sentences(frame)], _comparisons(frame), _sizes(frame)]
    return [line for block in blocks if block for line in (*block, "")]


def _where(arm: pd.Series) -> str:
    return f"{arm['case_name']}, {arm['name']}"


def _range(speed_ups: pd.Series) -> str:
    low, high = f"{speed_ups.min():.2f}×", f"{speed_ups.max():.2f}×"
    return low if low == high else f"{low} to {high}"


def _sentences(frame: pd.DataFrame) -> Iterator[str]:
    merged = frame[frame["merges"]]
    speed_ups = medians(merged["faster_than_plain"][merged["arm"] == TOME])
    if speed_ups.count():
        best = merged.loc[speed_ups.idxmax()]
        low, high = best["faster_than_plain"][1:]
        yield (
            f"ToMe is {_range(speed_ups)} as fast as plain in {speed_ups.count()} arms; the fastest is {_where(best)} "
            f"(quartiles {low:.2f}–{high:.2f})."
        )
    slower, count = _slower(merged), merged["time"].count()
    if len(slower):
        worst = slower.sort_values("speed_up", kind="stable").iloc[0]
        yield (
            f"**Where merging is slower** than plain or the same attention unmerged: {slower.index.nunique()} of "
            f"{count} merged arms, listed below. The slowest is {_where(worst)}, which takes "
            f"{1 / worst['speed_up']:.2f} times as long as {worst['baseline']}."
        )
    elif count:
        yield f"None of {count} merged arms is slower than plain or the same attention unmerged."
    above = medians(merged["over_limit"])
    if above.count():
        yield (
            f"{(above <= 1 + TARGET).sum()} of {above.count()} merged arms take at most {100 * TARGET:g} % longer than"
            " the free-merge limit, the fastest that merging can be; the most is "
            f"{change(above.max())}, in {_where(merged.loc[above.idxmax()])}."
        )
    memory = merged["memory_over_unmerged"]
    if memory.count():
        yield (
            f"Merging changes peak memory by {change(memory.max(), 0)} to {change(memory.min(), 0)} against the same "
            f"attention unmerged; it saves most in {_where(merged.loc[memory.idxmin()])}."
        )
    too_large = frame[(frame["arm"] == PLAIN) & (frame["status"] == OUT_OF_MEMORY)]
    fits = too_large.merge(merged[merged["time"].notna()], on=["case", "backend"], suffixes=("", "_merged"))
    if len(fits):
        yield f"Merged arms fit in memory where plain does not: {'; '.join(fits['case_name'].unique())}."
    differences = frame["parity"].map(lambda parity: parity["difference"], na_action="ignore").astype(float)
    if differences.count():
        yield (
            f"Before timing, the outputs of {differences.count()} arms were compared with what they must equal. The "
            f"largest relative difference is {differences.max():.1e} ({_where(frame.loc[differences.idxmax()])})."
        )


def _comparisons(frame: pd.DataFrame) -> list[str]:
    """The range of the speed-ups over all cases, for each comparison and backend."""
    rows = []
    for arm, column, words in SUMMARY:
        arms = frame[frame["merges"] & (frame["arm"] == arm)]
        for backend, speed_ups in medians(arms[column]).dropna().groupby(arms["backend"], sort=False):
            slower = f"{(speed_ups < 1).sum()} of {len(speed_ups)} arms"
            rows.append([words, backend, _range(speed_ups), slower])
    return table(["speed-up of", "backend", "over all cases", "slower in"], rows)


def _sizes(frame: pd.DataFrame) -> list[str]:
    """The speed-ups of ToMe by model and size, at one ratio for each backend."""
    arms = frame[frame["merges"] & (frame["arm"] == TOME) & frame["faster_than_plain"].notna()]
    if arms.empty:
        return []
    arms = arms[arms["ratio"] == arms.groupby("backend")["ratio"].transform(nearest, 0.5)]
    columns = "ToMe " + arms["ratio"].map("{:g}".format) + " over plain, " + arms["backend"]
    keys = [arms["subject"].rename("model"), arms["size, px"], columns]
    return _table(medians(arms["faster_than_plain"]).groupby(keys, sort=False).agg(_range).unstack())


def _slower(merged: pd.DataFrame) -> pd.DataFrame:
    """The merged arms that take longer than their `baseline`: plain, and for both also memory-efficient attention."""
    parts = []
    for column, baseline in (("faster_than_plain", "plain"), ("faster_than_efficient", "memory-efficient attention")):
        arms = merged if baseline == "plain" else merged[merged["arm"] == BOTH]
        speed_ups = medians(arms[column])
        parts.append(arms.assign(ratios=arms[column], speed_up=speed_ups, baseline=baseline)[speed_ups < 1])
    return pd.concat(parts).sort_index(kind="stable")


def _groups(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """The title and the arms of each section; a case that was measured twice is in two sections."""
    cases = frame.drop_duplicates("case").set_index("case")
    repeats = cases.groupby([*CASE, "machine"], dropna=False, sort=False).cumcount()
    groups: list[tuple[str, pd.DataFrame]] = []
    frame = frame.assign(repeat=frame["case"].map(repeats))
    for _, arms in frame.groupby([*GROUP, "repeat"], dropna=False, sort=False):
        first = arms.iloc[0]
        title = f"{first['subject']}, {first['dtype']}"
        title += f", {first['steps']:g} steps" if pd.notna(first["steps"]) else ""
        title += f", guidance scale {first['guidance_scale']:g}" if pd.notna(first["guidance_scale"]) else ""
        title += f", {first['file'].name}" if title in dict(groups) else ""
        arms = arms.sort_values(["size", "batch", "memory_limit_gb"], kind="stable", na_position="first")
        groups.append((title, arms))
    return groups


def _plots(arms: pd.DataFrame, index: int) -> dict[str, Figure]:
    """The plots of a section by their file names."""
    first = arms.iloc[0]
    words = f"speed {index} {Path(first['model']).name} {first['scope']} {first['dtype']}".lower()
    prefix = "_".join("".join(letter if letter.isalnum() else " " for letter in words).split())
    figures = {"distance_from_limit": time_above_limit(arms), "eager_against_predictor": eager_against_predictor(arms)}
    for backend in (EAGER, PREDICTOR):
        figures[f"speed_up_against_size_{backend}"] = speed_up_by_size(arms, backend)
        figures[f"against_ratio_{backend}"] = time_and_memory_by_ratio(arms, backend)
    return {f"{prefix}_{name}.png": figure for name, figure in figures.items() if figure}


def _section(arms: pd.DataFrame) -> list[str]:
    tables: dict[str, list[str]] = {}
    for backend in (EAGER, PREDICTOR):
        of_backend = arms[arms["backend"] == backend]
        levels = sorted(set(of_backend.loc[of_backend["merges"], "max_downsample"])) or [0]
        for level in levels if len(of_backend) else []:
            is_unmerged = of_backend["arm"].isin([PLAIN, MEMORY_EFFICIENT])
            at_level = of_backend[is_unmerged | (of_backend["max_downsample"] == level)]
            tables |= _layouts(at_level, backend + (f", max_downsample {level}" if level else ""))
    tables |= {
        "Slower than without merging": _slower_lines(arms),
        f"Time above the free-merge limit, target {100 * TARGET:g} %": _limit_table(arms),
        "Share of the merging blocks' time": _shares(arms),
        "Against ppdiffusers' built-in ToMe": _peers(arms, "built-in", "faster_than_built_in", arm=BUILT_IN),
        "Against PyTorch with diffusers and tomesd": _peers(arms, "PyTorch", "faster_than_pytorch", backend=PYTORCH),
        "Predictor against eager": _peers(arms, "eager", "faster_than_eager", backend=EAGER),
        "Not measured": _not_measured(arms),
    }
    return [line for heading, rows in tables.items() if rows for line in (f"### {heading}", "", *rows, "")]


def _layouts(arms: pd.DataFrame, words: str) -> dict[str, list[str]]:
    """Tables of time and memory by size and batch, and by ratio, for the arms of one backend at one level."""
    ratios = set(arms.loc[arms["merges"], "ratio"]) or {0.5}
    ratio = nearest(ratios, 0.5)
    unit = "s for the whole batch" if arms["scope"].iloc[0] == "pipeline" else "s a pass"
    has_memory = arms["peak_memory_bytes"].notna().any()
    at_ratio = arms[arms["ratio"].isin([0, ratio]) & (arms["arm"] != LIMIT)]
    place = f"size and batch, ratio {ratio:g}, {words}"
    tables = {f"Time by {place}": _table(_pivot(at_ratio, CASE_CELLS, "time_and_change", unit))}
    if has_memory:
        tables[f"Peak memory by {place}"] = _table(_pivot(at_ratio, CASE_CELLS, "memory_and_change", "GB"))
    if len(ratios) > 1:
        merged = {PLAIN: TOME, MEMORY_EFFICIENT: BOTH}  # ratio 0 of these columns
        columns = arms.assign(arm=arms["arm"].replace(merged), ratio=_text(arms["ratio"], "{:g}".format))
        by_ratio = [_pivot(columns, [*CASE_CELLS, "ratio"], "time_and_speed_up", unit)]
        if has_memory:
            by_ratio.append(
                _pivot(columns[columns["arm"] != LIMIT], [*CASE_CELLS, "ratio"], "memory_and_change", "GB")
            )
        tables[f"Time and memory by ratio, {words}"] = _table(pd.concat(by_ratio, axis=1))
    return tables


def _pivot(arms: pd.DataFrame, rows: list[str], cell: str, unit: str) -> pd.DataFrame:
    """Cells with a row for each combination of the columns `rows`, and a column for each kind of arm."""
    cells = arms.pivot(index=rows, columns="arm", values=cell)
    return cells[[arm for arm in COLUMNS if arm in cells]].rename(columns=lambda arm: f"{ARM_NAMES[arm]}, {unit}")


def _slower_lines(arms: pd.DataFrame) -> list[str]:
    merged = arms[arms["merges"]]
    if not merged["time"].count():
        return []
    lines = [
        f"- {row['shape']}: {row['name']} takes {1 / row['speed_up']:.2f} times as long as {row['baseline']}"
        + (" (within the noise: the quartiles lie on both sides of 1)" if row["ratios"].high >= 1 else "")
        for row in _slower(merged).to_dict("records")
    ]
    return lines or ["None: no merged arm is slower than plain or the same attention unmerged."]


def _limit_table(arms: pd.DataFrame) -> list[str]:
    over = medians(arms["over_limit"]).dropna()
    verdicts = (over <= 1 + TARGET).map({True: "reached", False: "**not reached**"})
    return _table(_by_arm(arms.loc[over.index], {"time above the limit": _text(over, change), "target": verdicts}))


def _shares(arms: pd.DataFrame) -> list[str]:
    arms = arms[arms["shares"].notna()]
    shares = pd.DataFrame([*arms["shares"]], arms.index, columns=["matching", "merge", "unmerge"], dtype=float)
    shares = (100 * shares.assign(total=shares.sum(axis=1))).map("{:.1f} %".format)
    return _table(_by_arm(arms, dict(shares)))


def _peers(arms: pd.DataFrame, peer: str, column: str, **changes: str) -> list[str]:
    """The arms whose speed-up over a peer, which differs by `changes`, is in a column."""
    columns = {
        f"{peer}, s": partners(arms, **changes)["time_cell"],
        "this arm, s": arms["time_cell"],
        f"speed-up over {peer}": _text(arms[column], SPEED_UP),
    }
    return _table(_by_arm(arms, columns)[(arms[column].notna() & (arms["arm"] != LIMIT)).to_numpy()])


def _not_measured(arms: pd.DataFrame) -> list[str]:
    """Each reason for which arms were not measured, with the arms."""
    arms = arms[arms["status"] != MEASURED]
    reasons = arms["status"] + ": " + arms["reason"].fillna("no reason given")
    return [f"- {reason}: {'; '.join(names.unique())}" for reason, names in arms["name"].groupby(reasons, sort=False)]


def _every_figure(arms: pd.DataFrame) -> list[str]:
    times = _text(arms["time"], lambda t: f"{t.median:.4g} [{t.low:.4g}–{t.high:.4g}]")
    columns = {
        "tokens": arms["kept"].astype(str) + " of " + arms["tokens"].astype(str),
        "s, median and quartiles": times.fillna(arms["status"] + (": " + arms["reason"]).fillna("")),
        "speed-up over plain": _text(arms["faster_than_plain"], SPEED_UP),
        "peak memory, GB": arms["memory_cell"],
        "GMACs a pass": _text(arms["macs"] / 1e9, "{:.2f}".format),
        "parity": _text(arms["parity"], lambda parity: f"{parity['difference']:.1e}, {parity['against']}"),
    }
    return _table(_by_arm(arms, columns))


def _by_arm(arms: pd.DataFrame, columns: dict[str, pd.Series]) -> pd.DataFrame:
    """Cells with a row for each arm."""
    return pd.DataFrame({"case": arms["shape"], "arm": arms["name"], **columns}).set_index(["case", "arm"])


def _sources(arms: pd.DataFrame, output: Path) -> list[str]:
    """Where the figures of a section come from: file, machine, versions, commit and command."""
    lines = []
    for row in arms.drop_duplicates("file").to_dict("records"):
        about = row["environment"]
        versions = [
            f"{name} {about[name]}" for name in PACKAGES if about.get(name, "not installed") != "not installed"
        ]
        lines.append(
            f"- {_file_link(row['file'], output)}: {about.get('machine')}, {about.get('device')}, threads: "
            f"{row['threads']}, cores: {about.get('cores')}; {', '.join(versions)}, Python {about.get('python')}; "
            f"commit {row['commit']}; {row['rounds']} rounds; `{row['command']}`"
        )
    return lines


def _file_link(file: Path, output: Path) -> str:
    return f"[{file.name}]({link(file, output)})"
