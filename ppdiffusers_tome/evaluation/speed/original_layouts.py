"""Our figures in the layout of the original tables, and the original figures themselves, marked as theirs."""

from collections.abc import Callable, Sequence

from .markdown import NOTHING, anchor, change, memory_cell, table, time_cell, times, unit
from .names import BOTH, LIMIT, MEMORY_EFFICIENT, PLAIN, TOME
from .original import (
    DIFFUSERS,
    DIFFUSERS_ROWS,
    OOM,
    PPDIFFUSERS,
    PPDIFFUSERS_ROWS,
    TOMESD,
    TOMESD_ROWS,
    Document,
    Seconds,
)
from .results import Arm, Case

COLUMNS = {
    PLAIN: "plain",
    TOME: "ToMe",
    MEMORY_EFFICIENT: "memory-efficient attention",
    BOTH: "ToMe + memory-efficient",
}


def by_size_and_batch(cases: Sequence[Case], backend: str, ratio: float, level: int | None) -> list[str]:
    """diffusers' layout: seconds, and in parentheses their change against plain."""

    def cell(case: Case, arm: Arm | None) -> str:
        speed_up = case.speed_up(arm) if arm and arm.arm != PLAIN else None
        return time_cell(arm) + (f" ({change(1 / speed_up.median)})" if speed_up else "")

    return _grid(cases, backend, ratio, level, cell, unit(cases))


def memory_by_size_and_batch(cases: Sequence[Case], backend: str, ratio: float, level: int | None) -> list[str]:
    """The same layout for peak memory; no lines where Paddle counted none."""

    def cell(case: Case, arm: Arm | None) -> str:
        plain = case.find(PLAIN, backend)
        return memory_cell(arm) + (_memory_change(arm, plain) if arm and arm.arm != PLAIN else "")

    counted = any(arm.peak_memory_bytes for case in cases for arm in case.arms if arm.backend == backend)
    return _grid(cases, backend, ratio, level, cell, "GB") if counted else []


def _grid(
    cases: Sequence[Case],
    backend: str,
    ratio: float,
    level: int | None,
    cell: Callable[[Case, Arm | None], str],
    measured_in: str,
) -> list[str]:
    rows = []
    for case in cases:
        cells = [cell(case, case.find(name, backend, ratio, level)) for name in COLUMNS]
        limit = NOTHING if case.memory_limit_gb is None else f"{case.memory_limit_gb:g} GB"
        rows.append([str(case.size), str(case.batch), limit, *cells])
    header = ["size, px", "batch", "memory limit", *(f"{name}, {measured_in}" for name in COLUMNS.values())]
    return table(header, rows)


def by_batch(cases: Sequence[Case], backend: str, ratios: Sequence[float], level: int | None) -> list[str]:
    """ppdiffusers' layout, for cases of one size: seconds, a merged cell holding one figure for each ratio."""

    def cells(case: Case, name: str) -> str:
        found = [time_cell(case.find(name, backend, ratio, level)) for ratio in ratios]
        return NOTHING if set(found) == {NOTHING} else " / ".join(found)

    rows = []
    for case in cases:
        unmerged = [time_cell(case.find(name, backend)) for name in (PLAIN, MEMORY_EFFICIENT)]
        batch = case.shape.removeprefix(f"{case.size} px, batch ")
        rows.append([batch, unmerged[0], cells(case, TOME), unmerged[1], cells(case, BOTH)])
    return table(["batch", *COLUMNS.values()], rows)


def by_ratio(case: Case, backend: str, level: int | None) -> list[str]:
    """tomesd's layout: seconds and peak memory by ratio, in parentheses the speed-up and the change of memory.

    At 512 px the original's figures stand in the last columns, marked as theirs.
    """
    plain = case.find(PLAIN, backend)
    merged = [arm for arm in case.arms if (arm.backend, arm.max_downsample) == (backend, level)]
    ratios = sorted({arm.ratio for arm in merged if arm.arm in (TOME, BOTH)} - {0.0})

    def timed(arm: Arm | None) -> str:
        speed_up = case.speed_up(arm) if arm and arm is not plain else None
        return time_cell(arm) + (f" ({times(speed_up)})" if speed_up else "")

    def counted(arm: Arm | None) -> str:
        return memory_cell(arm) + (_memory_change(arm, plain) if arm and arm is not plain else "")

    theirs = {row.ratio: row for row in TOMESD_ROWS} if case.size == 512 else {}
    rows = []
    for ratio in [0.0, *ratios]:
        names = (TOME, BOTH, LIMIT) if ratio else (PLAIN, MEMORY_EFFICIENT, LIMIT)
        arms = [case.find(name, backend, ratio, level) for name in names]
        original = theirs.get(ratio)
        beside = [NOTHING, NOTHING]
        if original:
            better = [f" ({original.speed_up:.2f}×)", f" ({change(original.memory_share)})"] if ratio else ["", ""]
            beside = [f"{original.seconds:.2f}{better[0]}", f"{original.memory_gb:.2f}{better[1]}"]
        figures = [timed(arms[0]), counted(arms[0]), timed(arms[1]), counted(arms[1]), timed(arms[2])]
        rows.append([f"{ratio:g}", *figures, *beside])
    marked = f"*theirs, {TOMESD.machine.split(' ', 1)[1]}, another machine*"
    columns = ["ToMe, s", "ToMe, GB", "memory-efficient, s", "memory-efficient, GB", "free-merge limit, s"]
    return table(["ratio", *columns, f"{marked}: s a picture", f"{marked}: GB a picture"], rows)


def theirs_by_size(sizes: set[int]) -> list[str]:
    """diffusers' rows of these sizes, under a heading that marks them as theirs."""
    rows = [row for row in DIFFUSERS_ROWS if row.size in sizes]
    if not rows:
        return [f"They measured no picture of this size; {_link(DIFFUSERS)}."]
    cells = [
        [row.gpu, str(row.size), str(row.batch), _theirs(row.plain)]
        + [_theirs(taken, row.plain) for taken in (row.tome, row.both)]
        for row in rows
    ]
    header = ["GPU, theirs", "size, px", "batch", "plain", "ToMe", "ToMe + xFormers"]
    return [*_marked(DIFFUSERS), *table(header, cells)]


def theirs_by_batch(sizes: set[int]) -> list[str]:
    """ppdiffusers' rows, under a heading that marks them as theirs."""
    if 512 not in sizes:
        return [f"They measured no picture of this size; {_link(PPDIFFUSERS)}."]
    cells = [
        [str(row.batch), _theirs(row.plain), " / ".join(map(_theirs, row.tome)), " / ".join(map(_theirs, row.both))]
        for row in PPDIFFUSERS_ROWS
    ]
    return [*_marked(PPDIFFUSERS), *table(["batch", "plain", "ToMe", "xFormers (cutlass) + ToMe"], cells)]


def theirs_by_ratio() -> list[str]:
    """tomesd's rows, under a heading that marks them as theirs."""
    cells = [
        [
            f"{row.ratio:g}",
            f"{row.fid:.2f}",
            f"{row.seconds:.2f} ({row.speed_up:.2f}×)",
            f"{row.memory_gb:.2f} ({change(row.memory_share)})",
        ]
        for row in TOMESD_ROWS
    ]
    return [*_marked(TOMESD), *table(["ratio", "FID", "s a picture", "GB a picture"], cells)]


def originals() -> list[str]:
    """All three original tables, whole, each under the heading that tables elsewhere link to."""
    lines = ["## The original figures: theirs, on other machines, never ours", ""]
    whole = (
        (DIFFUSERS, theirs_by_size({row.size for row in DIFFUSERS_ROWS})),
        (PPDIFFUSERS, theirs_by_batch({512})),
        (TOMESD, theirs_by_ratio()),
    )
    for document, rows in whole:
        lines += [f"### {_heading(document)}", "", *rows[2:], ""]
    return lines


def link_to(document: Document) -> str:
    """A sentence that leads to a document's figures in this report."""
    return f"Beside it, {_link(document)}."


def _heading(document: Document) -> str:
    return f"Theirs, on {document.machine}: another machine, never ours. {document.title}"


def _link(document: Document) -> str:
    return f"[{document.title}, theirs, on {document.machine}: another machine](#{anchor(_heading(document))})"


def _marked(document: Document) -> list[str]:
    about = f"[{document.title}]({document.source}): {document.setting}; {document.unit}."
    return [f"#### Theirs, on {document.machine}: another machine, never ours", "", about, ""]


def _memory_change(arm: Arm, plain: Arm | None) -> str:
    """Behind the memory of an arm that merges: its change against plain's, where both were counted."""
    base = plain.peak_memory_bytes if plain else None
    return f" ({change(arm.peak_memory_bytes / base)})" if base and arm.peak_memory_bytes else ""


def _theirs(taken: Seconds, plain: Seconds = OOM) -> str:
    """Seconds, with their change against plain's where both are there."""
    if isinstance(taken, str):
        return taken
    return f"{taken:g}" + ("" if isinstance(plain, str) else f" ({change(taken / plain, 2)})")
