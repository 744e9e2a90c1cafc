"""The report on speed and memory: a page of tables and plots."""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from ..markdown import NOT_MEASURED, change, link, number, table
from ..operations import describe_operations
from ..plotting import save_figure
from ..results import check_result, read_json
from . import cases
from .frame import CASE, KEY, at_ratio, nearest, partners, read_frame
from .overhead import PARTS
from .speed_plots import (
    TARGET,
    eager_against_predictor,
    plan_growth,
    speed_up_by_method,
    speed_up_by_size,
    time_above_limit,
    time_and_memory_by_ratio,
)

COLUMNS = [cases.PLAIN, cases.TOME, cases.MEMORY_EFFICIENT, cases.BOTH, cases.LIMIT]  # of tables by size and ratio
RATIO_0 = {cases.PLAIN: cases.TOME, cases.MEMORY_EFFICIENT: cases.BOTH}  # in whose column an unmerged arm is ratio 0
SUMMARY = [  # arm, column of its speed-up, and the comparison in words
    (cases.TOME, "faster_than_plain", "ToMe over plain"),
    (cases.TOME, "faster_than_efficient", "ToMe over memory-efficient attention"),
    (cases.BOTH, "faster_than_plain", "ToMe + memory-efficient attention over plain"),
    (cases.BOTH, "faster_than_efficient", "ToMe + memory-efficient attention over memory-efficient attention"),
    (cases.TOME, "faster_than_built_in", "ToMe over ppdiffusers' built-in ToMe"),
    (cases.TOME, "faster_than_pytorch", "ToMe over tomesd on PyTorch"),
    (cases.TOME, "faster_than_eager", "ToMe in the predictor over ToMe in eager"),
]
PEERS: list[
    tuple[str, str, str, Callable[[pd.DataFrame], dict[str, Any]]]
] = [  # heading, the peer in words, column of the speed-up over it, and how the peer's key differs
    (
        "Against ppdiffusers' built-in ToMe",
        "built-in",
        "faster_than_built_in",
        lambda arms: {"arm": cases.BUILT_IN, "method": arms["tomesd"]},
    ),
    (
        "Against PyTorch with diffusers and tomesd",
        "PyTorch",
        "faster_than_pytorch",
        lambda arms: {"backend": cases.PYTORCH, "method": arms["tomesd"]},
    ),
    ("Predictor against eager", "eager", "faster_than_eager", lambda arms: {"backend": cases.EAGER}),
    (
        "Other runtimes against the predictor",
        "predictor",
        "faster_than_predictor",
        lambda arms: {"backend": cases.PREDICTOR},
    ),
]
PACKAGES = (
    "paddlepaddle paddlepaddle-gpu ppdiffusers ppdiffusers_tome numpy onnxruntime openvino torch diffusers tomesd"
)
PUBLISHED = "published_figures.md"
INTRODUCTION = """\
A *case* is one model at one image size and batch. Its *arms* compute it in different ways: *plain* is the model as it
is, *ToMe 0.5* merges away half of the tokens before attention, *memory-efficient* is xformers on a GPU and sliced
attention on a CPU, *ToMe + memory-efficient* is both. *Eager* runs the model layer by layer, *predictor* runs a
program exported from it. A speed-up of 1.50× means 1.5 times as fast; an arm below 1× is slower."""
OTHER_METHODS = """\
*ToMe* alone is the method of tomesd. Its variants have their settings in their names: *windows of 16* compare tokens
within windows of 16×16 only, *proportional* weights merged tokens by their size, *keys and values* merge alone, and
*2×2 cells* merge without a comparison."""
HOW_TO_READ = """\
All arms of a case take turns in every round. A speed-up is the median of the ratios within rounds, with quartiles in
square brackets. Percentages in parentheses are changes of time or memory against plain in the same backend: −40 % is
40 % less, +40 % is 40 % more. The *free-merge limit* computes on as few tokens, but neither chooses nor moves any: its
output is wrong, and merging that costs nothing takes about as long. A time below it is noise, or what the limit's own
slice and repetition cost. Memory is the peak of Paddle's own counter in one pass, with weights.
The machine is shared and noisy: compare ratios, not seconds. Merging is lossy: `evaluate` measures the changes."""


def write_report(files: Sequence[Path], output: Path) -> str:
    """Write `speed.md` and its plots into a folder, which is made if it is missing; returns the text of `speed.md`.

    Result files of other kinds are listed on the page and not used.

    Raises:
        ToMeConfigError: as `read_frame`; nothing is written.
    """
    frame, skipped = read_frame(files)
    frame = _with_cells(frame)
    lines = ["# Speed and memory", "", INTRODUCTION, ""]
    if _has_other_methods(frame):
        lines += [OTHER_METHODS, ""]
    for block in ([f"- {sentence}" for sentence in _sentences(frame)], _comparisons(frame), _sizes(frame)):
        lines += [*block, ""] if block else []
    lines += [HOW_TO_READ, ""]
    if (output / PUBLISHED).exists():
        lines += [f"Figures published by other projects, on other hardware: [{PUBLISHED}]({PUBLISHED}).", ""]
    if skipped:
        names = ", ".join(f"[{file.name}]({link(file, output)}) ({kind})" for file, kind in skipped)
        lines += [f"Not in this report, because they are not speed results: {names}.", ""]
    for index, (title, arms) in enumerate(_sections(frame), start=1):
        sources = [_source(row, output) for row in arms.drop_duplicates("file").to_dict("records")]
        lines += [f"## {title}", "", *sources, ""]
        for heading, rows in _tables(arms):
            lines += [f"### {heading}", "", *rows, ""] if rows else []
        for name, figure in _plots(arms, index):
            save_figure(figure, output / name)
            title = figure.get_suptitle().replace("\n", ": ")
            lines += [f"![{title}]({name})", ""]
        lines += ["<details><summary>Every figure: time, memory, multiply-accumulates, parity</summary>", ""]
        lines += [*_every_figure(arms), "", "</details>", ""]
    text = "\n".join(lines).rstrip() + "\n"
    output.mkdir(parents=True, exist_ok=True)
    (output / "speed.md").write_text(text, encoding="utf-8")
    return text


def write_operations(file: Path, output: Path) -> str:
    """Write the page of a result of `bench ops`, named as the file, and its plot into a folder; returns its text.

    Raises:
        ToMeConfigError: the file is not such a result.
    """
    result = read_json(file)
    check_result(result, "operations", file)
    source = _source({**result, "file": file, "threads": result["environment"]["threads"]}, output)
    lines = ["# Plan, merge and unmerge", "", source, "", *describe_operations(result), ""]
    output.mkdir(parents=True, exist_ok=True)
    if figure := plan_growth(result["growth"]["plans"]):
        save_figure(figure, output / f"{file.stem}_growth.png")
        lines += [f"![{figure.get_suptitle()}]({file.stem}_growth.png)", ""]
    text = "\n".join(lines)
    (output / f"{file.stem}.md").write_text(text, encoding="utf-8")
    return text


def _with_cells(frame: pd.DataFrame) -> pd.DataFrame:
    """With columns of text: an arm in words, and its time and peak memory, alone and with changes against plain."""
    failures = frame["status"].map({cases.OUT_OF_MEMORY: "OOM", cases.ERROR: "error"})
    time = _text(frame["time"], number, failures)
    memory = _text(frame["peak_memory_bytes"] / 1e9, number, failures)
    memory_ratio = frame["memory_over_plain"].mask(frame["arm"] == cases.PLAIN)
    texts = {
        "where": frame["case_name"] + ", " + frame["name"],
        "size, px": frame["size"],
        "memory limit": _text(frame["memory_limit_gb"], "{:g} GB".format, NOT_MEASURED),
        "ratio_cell": _text(frame["ratio"], "{:g}".format),
        "time_cell": time,
        "memory_cell": memory,
        "time_and_change": time + _text(1 / frame["faster_than_plain"], lambda ratio: f" ({change(ratio)})", ""),
        "time_and_speed_up": time + _text(frame["faster_than_plain"], " ({:.2f}×)".format, ""),
        "memory_and_change": memory + _text(memory_ratio, lambda ratio: f" ({change(ratio)})", ""),
    }
    return frame.assign(**texts)


def _text(values: pd.Series, write: Callable[[Any], str], missing: pd.Series | str | None = None) -> pd.Series:
    others = pd.Series(missing, values.index, dtype=object)
    texts = [other if pd.isna(value) else write(value) for value, other in zip(values, others, strict=True)]
    return pd.Series(texts, values.index, dtype=object)


def _with_quartiles(arms: pd.DataFrame, column: str, form: str = "{:.2f}", unit: str = "×") -> pd.Series:
    median, low, high = (_text(arms[name], form.format) for name in (column, f"{column}_low", f"{column}_high"))
    return median + f"{unit} [" + low + "–" + high + "]"


def _range(speed_ups: pd.Series) -> str:
    low, high = f"{speed_ups.min():.2f}×", f"{speed_ups.max():.2f}×"
    return low if low == high else f"{low} to {high}"


def _sentences(frame: pd.DataFrame) -> Iterator[str]:
    """What the results show, gains and losses alike."""
    merged = frame[frame["merges"]]
    for method, arms in merged[merged["arm"] == cases.TOME].groupby("method", sort=False):
        speed_ups = arms["faster_than_plain"]
        if speed_ups.count():
            best = merged.loc[speed_ups.idxmax()]
            yield (
                f"{method} is {_range(speed_ups)} as fast as plain in {speed_ups.count()} arms; the fastest is "
                f"{best['where']} (quartiles {best['faster_than_plain_low']:.2f}–"
                f"{best['faster_than_plain_high']:.2f})."
            )
    slower, count = _slower(merged), merged["time"].count()
    if len(slower):
        worst = slower.sort_values("speed_up", kind="stable").iloc[0]
        yield (
            f"**Where merging is slower** than plain or the same attention unmerged: {slower.index.nunique()} of "
            f"{count} merged arms, listed below. The slowest is {worst['where']}, which takes "
            f"{1 / worst['speed_up']:.2f} times as long as {worst['baseline']}."
        )
    elif count:
        yield f"None of {count} merged arms is slower than plain or the same attention unmerged."
    above = merged["over_limit"]
    if above.count():
        below = f" {(above < 1).sum()} are below it by noise, by up to {change(above.min())}." * bool(
            (above < 1).any()
        )
        yield (
            f"{(above <= 1 + TARGET).sum()} of {above.count()} merged arms take at most {100 * TARGET:g} % longer than"
            f" the free-merge limit; the most is {change(above.max())}, in {merged.loc[above.idxmax(), 'where']}."
            + below
        )
    repeats = merged.groupby([*CASE, "machine", *KEY[1:]], dropna=False)["faster_than_plain"]
    if count := (repeats.count() > 1).sum():
        yield (
            f"{count} speed-ups were measured in several runs, and differ between runs by up to "
            f"{change((repeats.max() / repeats.min()).max())}: do not rank by smaller differences."
        )
    memory = merged["memory_over_unmerged"]
    if memory.count():
        yield (
            f"Merging changes peak memory by {change(memory.max(), 0)} to {change(memory.min(), 0)} against the same "
            f"attention unmerged; it saves most in {merged.loc[memory.idxmin(), 'where']}."
        )
    too_large = frame[(frame["arm"] == cases.PLAIN) & (frame["status"] == cases.OUT_OF_MEMORY)]
    fits = too_large.merge(merged[merged["time"].notna()], on=["case", "backend"], suffixes=("", "_merged"))
    if len(fits):
        yield f"Merged arms fit in memory where plain does not: {'; '.join(fits['case_name'].unique())}."
    differences = frame["parity"].str["difference"].astype(float)
    if differences.count():
        yield (
            f"Before timing, the outputs of {differences.count()} arms were compared with what they must equal. The "
            f"largest relative difference is {differences.max():.1e} ({frame.loc[differences.idxmax(), 'where']})."
        )


def _slower(merged: pd.DataFrame) -> pd.DataFrame:
    """The merged arms that take longer than their `baseline`: plain, and for both also memory-efficient attention."""
    parts = []
    for column, baseline in {
        "faster_than_plain": "plain",
        "faster_than_efficient": "memory-efficient attention",
    }.items():
        arms = merged[(merged[column] < 1) & ((merged["arm"] == cases.BOTH) | (baseline == "plain"))]
        parts.append(arms.assign(speed_up=arms[column], high=arms[f"{column}_high"], baseline=baseline))
    return pd.concat(parts).sort_index(kind="stable")


def _has_other_methods(arms: pd.DataFrame) -> bool:
    return bool(set(arms["method"]) - {"", "ToMe"})


def _comparisons(frame: pd.DataFrame) -> list[str]:
    """The range of the speed-ups over all cases, for each comparison, method and backend."""
    rows, is_named = [], _has_other_methods(frame)
    for arm, column, words in SUMMARY:
        arms = frame[frame["merges"] & (frame["arm"] == arm)].dropna(subset=column)
        for (method, backend), speed_ups in arms.groupby(["method", "backend"], sort=False)[column]:
            slower = f"{(speed_ups < 1).sum()} of {len(speed_ups)} arms"
            rows.append([words, method if is_named else NOT_MEASURED, backend, _range(speed_ups), slower])
    return table(["speed-up of", "method", "backend", "over all cases", "slower in"], rows)


def _sizes(frame: pd.DataFrame) -> list[str]:
    """The speed-ups of ToMe by model and size, at one ratio for each method and backend."""
    arms = frame[frame["merges"] & (frame["arm"] == cases.TOME) & frame["faster_than_plain"].notna()]
    if arms.empty:
        return []
    arms = arms[at_ratio(arms)]
    keys, columns = [arms["subject"].rename("model"), arms["size, px"]], " over plain, " + arms["backend"]
    if _has_other_methods(arms):
        keys += [arms["label_at"].rename("method"), "speed-up" + columns]
    else:
        keys += [arms["label_at"] + columns]
    return _table(arms["faster_than_plain"].groupby(keys, sort=False).agg(_range).unstack())


def _sections(frame: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """The title and the arms of each section; a case that was measured twice is in two sections."""
    by_case = frame.drop_duplicates("case").set_index("case")
    repeats = by_case.groupby([*CASE, "machine"], dropna=False, sort=False).cumcount()
    title_of = frame["subject"] + ", " + frame["dtype"] + _text(frame["steps"], ", {:g} steps".format, "")
    title_of += _text(frame["guidance_scale"], ", guidance scale {:g}".format, "")
    titles: set[str] = set()
    for (title, *_), arms in frame.groupby([title_of, "machine", frame["case"].map(repeats)], sort=False):
        title += f", {arms['file'].iloc[0].name}" if title in titles else ""
        titles.add(title)
        yield title, arms.sort_values(["size", "batch", "memory_limit_gb"], kind="stable", na_position="first")


def _source(row: dict[Any, Any], output: Path) -> str:
    """Where figures come from: file, machine, versions, commit and command."""
    file = row["file"]
    about = {name: value for name, value in row["environment"].items() if value != "not installed"}
    versions = [f"{name} {about[name]}" for name in PACKAGES.split() if name in about]
    return (
        f"- [{file.name}]({link(file, output)}): {about.get('machine')}, {about.get('device')}, threads: "
        f"{row['threads']}, cores: {about.get('cores')}; {', '.join(versions)}, Python {about.get('python')}; "
        f"commit {row['commit']}; {row['rounds']} rounds; `{row['command']}`"
    )


def _tables(arms: pd.DataFrame) -> Iterator[tuple[str, list[str]]]:
    """The headings and lines of a section's tables; those without a row have no lines."""
    for backend, of_backend in arms[~arms["is_torch"]].groupby("backend"):  # eager first
        is_unmerged = of_backend["arm"].isin(RATIO_0)
        for level in sorted(set(of_backend.loc[of_backend["merges"], "max_downsample"])) or [0]:
            at_level = of_backend[is_unmerged | (of_backend["max_downsample"] == level)]
            yield from _layouts(at_level, backend + (f", max_downsample {level}" if level else ""))
    merged = arms[arms["merges"]]
    if merged["time"].count():
        lines = [
            f"- {row['shape']}: {row['name']} takes {1 / row['speed_up']:.2f} times as long as {row['baseline']}"
            + (" (within the noise: the quartiles lie on both sides of 1)" if row["high"] >= 1 else "")
            for row in _slower(merged).to_dict("records")
        ]
        none = "None: no merged arm is slower than plain or the same attention unmerged."
        yield "Slower than without merging", lines or [none]
    verdicts = _text(arms["over_limit"], lambda ratio: "reached" if ratio <= 1 + TARGET else "**not reached**")
    cells = {"time above the limit": _text(arms["over_limit"], change), "target": verdicts}
    yield f"Time above the free-merge limit, target {100 * TARGET:g} %", _by_arm(arms, cells)
    shares = 100 * pd.DataFrame({name: arms["shares"].str.get(name) for name in PARTS}, dtype=float)
    shares["total"] = shares.sum(axis=1, min_count=1)
    cells = {name: _text(shares[name], "{:.1f} %".format) for name in shares}
    yield "Share of the merging blocks' time", _by_arm(arms, cells)
    for heading, peer, column, key in PEERS:
        cells = {
            f"{peer}, s": partners(arms, **key(arms))["time_cell"],
            "this arm, s": arms["time_cell"],
            f"speed-up over {peer}": _with_quartiles(arms, column),
        }
        yield heading, _by_arm(arms[arms[column].notna()], cells)
    missing = arms[arms["status"] != cases.MEASURED]
    reasons = missing["status"] + ": " + missing["reason"].fillna("no reason given")
    names = missing["name"].groupby(reasons, sort=False).unique()
    yield "Not measured", [f"- {reason}: {'; '.join(names)}" for reason, names in names.items()]


def _layouts(arms: pd.DataFrame, words: str) -> Iterator[tuple[str, list[str]]]:
    """Tables of time and memory by size and batch, and by ratio, for the arms of one backend at one level.

    If they merge by several methods, one table of all arms instead.
    """
    merged = arms[arms["merges"]]
    unit = "s for the whole batch" if arms["scope"].iloc[0] == "pipeline" else "s a pass"
    if merged["method"].nunique() > 1:
        cells = {unit: arms["time_and_speed_up"], "peak memory, GB": arms["memory_and_change"]}
        yield f"Time and memory by method, {words}", _by_arm(arms, cells)
        return
    ratios = set(merged["ratio"]) or {0.5}
    ratio = nearest(ratios, 0.5)
    at_ratio = arms[arms["ratio"].isin([0, ratio]) & (arms["arm"] != cases.LIMIT)]
    place = f"by size and batch, ratio {ratio:g}, {words}"
    yield f"Time {place}", _table(_pivot(at_ratio, "time_and_change", unit))
    yield f"Peak memory {place}", _table(_pivot(at_ratio, "memory_and_change", "GB"))
    if len(ratios) > 1:
        arms = arms.assign(arm=arms["arm"].replace(RATIO_0), ratio=arms["ratio_cell"])
        time = _pivot(arms, "time_and_speed_up", unit, "ratio")
        memory = _pivot(arms[arms["arm"] != cases.LIMIT], "memory_and_change", "GB", "ratio")
        yield f"Time and memory by ratio, {words}", _table(pd.concat([time, memory], axis=1))


def _pivot(arms: pd.DataFrame, cell: str, unit: str, *rows: str) -> pd.DataFrame:
    """Cells with a row for each case, or also for each value of the columns `rows`, and a column for each arm."""
    cells = arms.pivot(index=["size, px", "batch", "memory limit", *rows], columns="arm", values=cell)
    labels = cases.ARM_NAMES | dict(zip(arms["arm"], arms["label"], strict=True))
    return cells.reindex(columns=COLUMNS).rename(columns=lambda arm: f"{labels[arm]}, {unit}")


def _every_figure(arms: pd.DataFrame) -> list[str]:
    times = _with_quartiles(arms, "time", "{:.4g}", "")
    cells = {
        "tokens": arms["kept"].astype(str) + " of " + arms["tokens"].astype(str),
        "s, median and quartiles": times.fillna(arms["status"] + (": " + arms["reason"]).fillna("")),
        "speed-up over plain": _with_quartiles(arms, "faster_than_plain"),
        "peak memory, GB": arms["memory_cell"],
        "GMACs a pass": _text(arms["macs"] / 1e9, "{:.2f}".format),
        "parity": _text(arms["parity"], "{0[difference]:.1e}, {0[against]}".format),
    }
    return _by_arm(arms, cells)


def _by_arm(arms: pd.DataFrame, cells: dict[str, pd.Series]) -> list[str]:
    index = pd.MultiIndex.from_frame(arms[["shape", "name"]], names=["case", "arm"])
    return _table(pd.DataFrame(cells, arms.index).set_index(index))


def _table(cells: pd.DataFrame) -> list[str]:
    """A Markdown table of the rows that have a value; its first columns are the frame's index."""
    cells = cells.dropna(how="all").reset_index().fillna(NOT_MEASURED).astype(str)
    return table(list(cells), cells.to_numpy().tolist())


def _plots(arms: pd.DataFrame, index: int) -> Iterator[tuple[str, Figure]]:
    """The file names and the plots of a section."""
    first = arms.iloc[0]
    words = f"speed {index} {Path(first['model']).name} {first['scope']} {first['dtype']}".lower()
    prefix = re.sub(r"[\W_]+", "_", words).strip("_")
    figures = {"distance_from_limit": time_above_limit(arms), "eager_against_predictor": eager_against_predictor(arms)}
    figures["speed_up_by_method"] = speed_up_by_method(arms)
    for backend in cases.BACKENDS:
        figures[f"speed_up_against_size_{backend}"] = speed_up_by_size(arms, backend)
        figures[f"against_ratio_{backend}"] = time_and_memory_by_ratio(arms, backend)
    yield from ((f"{prefix}_{name}.png", figure) for name, figure in figures.items() if figure)
