"""The report on speed and memory: Markdown in the layout of the original tables, with plots."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from matplotlib.figure import Figure

from . import details, plots
from . import original_layouts as layouts
from .findings import findings
from .markdown import level_words, merged_arms, nearest
from .names import EAGER, PREDICTOR, PYTORCH
from .original import DIFFUSERS, PPDIFFUSERS, TOMESD
from .results import SCOPES, Case, Result, read

INTRODUCTION = """\
Each ratio of times is taken within rounds, in which all arms of a case take turns; shown are medians, and quartiles in
square brackets. Percentages in parentheses are changes of time or memory against plain in the same backend: −40 % is
40 % less, +40 % is 40 % more. The free-merge limit computes over as few tokens without choosing or moving any: what it
draws is wrong, and no merging can be faster. Memory is the peak of Paddle's own counter in one pass, weights included.
Machines are shared and noisy: read ratios, not seconds. Merging is lossy: how far images change, evaluate shows."""

PACKAGES = (
    "paddlepaddle",
    "paddlepaddle-gpu",
    "ppdiffusers",
    "ppdiffusers_tome",
    "numpy",
    "torch",
    "diffusers",
    "tomesd",
)


@dataclass
class Group:
    """Cases that can stand in one table: one model, scope, precision and machine."""

    title: str
    slug: str
    cases: list[Case] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)


def write_report(files: Sequence[Path], output: Path | None) -> str:
    """Report on speed results.

    Args:
        files: JSON files; those that are no speed results are named in the report and otherwise left alone.
        output: folder for `speed.md` and its plots, made where it is missing; None writes nothing, and shows no plots.

    Returns:
        The report as Markdown, the text of `speed.md`.

    Raises:
        ToMeConfigError: no file is a speed result, or one cannot be read or has another format; nothing was written.
    """
    results, skipped = read(files)
    groups = _groups(results)
    figures = {name: figure for group in groups for name, figure in _figures(group)} if output else {}
    lines = ["# Speed and memory", "", *findings([case for result in results for case in result.cases]), ""]
    lines += [INTRODUCTION, ""]
    if skipped:
        lines += ["Not in this report, for they are no speed results:"]
        lines += [", ".join(f"{_link(file, output)} ({kind})" for file, kind in skipped) + ".", ""]
    for group in groups:
        shown = [name for name in figures if name.startswith(f"speed_{group.slug}_")]
        lines += _section(group, output, shown)
    text = "\n".join([*lines, *layouts.originals()]).rstrip() + "\n"
    if output:
        output.mkdir(parents=True, exist_ok=True)
        for name, figure in figures.items():
            plots.save(figure, output / name)
        (output / "speed.md").write_text(text, encoding="utf-8")
    return text


def _groups(results: Sequence[Result]) -> list[Group]:
    groups: dict[tuple, Group] = {}
    repeats: Counter[tuple] = Counter()
    for result in results:
        for case in result.cases:
            kind: tuple = (case.model, case.scope, case.dtype, case.steps, case.guidance, result.machine)
            key = (kind, repeats[kind, case.identity])  # what was measured twice stands in two sections
            repeats[kind, case.identity] += 1
            if key not in groups:
                title = _title(case)
                if any(group.title == title for group in groups.values()):
                    title += f", {result.path.name}"
                groups[key] = Group(title, _slug(case, len(groups) + 1))
            group = groups[key]
            group.cases.append(case)
            if result not in group.results:
                group.results.append(result)
    for group in groups.values():
        group.cases.sort(key=lambda case: (case.size, case.batch, case.memory_limit_gb or 0))
    return list(groups.values())


def _title(case: Case) -> str:
    steps = f", {case.steps} steps" if case.steps else ""
    guidance = f", guidance {case.guidance:g}" if case.guidance is not None else ""
    return f"{case.model}, {SCOPES.get(case.scope, case.scope)}, {case.dtype}{steps}{guidance}"


def _slug(case: Case, number: int) -> str:
    words = f"{number} {Path(case.model).name} {case.scope} {case.dtype}".lower()
    return "_".join("".join(letter if letter.isalnum() else " " for letter in words).split())


def _figures(group: Group) -> Iterator[tuple[str, Figure]]:
    """File names, and what they show."""
    drawn: list[tuple[str, Figure | None]] = [
        ("distance_from_limit", plots.distance_from_limit(group.cases)),
        ("eager_against_predictor", plots.eager_against_predictor(group.cases)),
    ]
    for backend in (EAGER, PREDICTOR):
        drawn.append((f"speed_up_against_size_{backend}", plots.speed_up_against_size(group.cases, backend)))
        fullest = _fullest(group.cases, backend)
        drawn.append((f"against_ratio_{backend}", plots.time_and_memory_against_ratio(fullest, backend)))
    for name, figure in drawn:
        if figure:
            yield f"speed_{group.slug}_{name.lower()}.png", figure


def _fullest(cases: Sequence[Case], backend: str) -> Case:
    """The case measured at most ratios; of several the largest picture, and the smallest batch."""

    def richness(case: Case) -> tuple[int, int, int]:
        ratios = {arm.ratio for _, arm in merged_arms([case], backend) if arm.is_measured}
        return len(ratios), case.size, -case.batch

    return max(cases, key=richness)


def _backends(cases: Sequence[Case]) -> list[str]:
    measured = {arm.backend for case in cases for arm in case.arms}
    return [backend for backend in (EAGER, PREDICTOR, PYTORCH) if backend in measured]


def _section(group: Group, output: Path | None, shown: Sequence[str]) -> list[str]:
    lines = [f"## {group.title}", "", *_sources(group, output), ""]
    own_backends = [backend for backend in _backends(group.cases) if backend != PYTORCH]
    for nth, backend in enumerate(own_backends):
        lines += _backend_section(group.cases, backend, has_theirs=nth == 0)
    tables = {
        "Slower than without merging": details.slower_lines(group.cases),
        f"Distance from the free-merge limit, target {100 * plots.TARGET:g} %": details.distances(group.cases),
        "Share of the merging blocks' time": details.shares(group.cases),
        "Against ppdiffusers' built-in ToMe": details.built_in(group.cases),
        "Against PyTorch with diffusers and tomesd": details.torch(group.cases),
        "Predictor against eager": details.predictor(group.cases),
        "Not measured": details.not_measured(group.cases),
    }
    for heading, rows in tables.items():
        lines += [f"### {heading}", "", *rows, ""] if rows else []
    for name in shown:
        lines += [f"![{name.removeprefix(f'speed_{group.slug}_').removesuffix('.png').replace('_', ' ')}]({name})", ""]
    lines += ["<details><summary>Every figure: spread, memory, multiply-accumulates, parity</summary>", ""]
    return [*lines, *details.every_figure(group.cases), "", "</details>", ""]


def _backend_section(cases: Sequence[Case], backend: str, has_theirs: bool) -> list[str]:
    cases = [case for case in cases if any(arm.backend == backend for arm in case.arms)]
    merged = merged_arms(cases, backend)
    lines: list[str] = []
    sizes = {case.size for case in cases}
    for level in sorted({arm.max_downsample for _, arm in merged}, key=lambda level: level or 0) or [None]:
        ratios = {arm.ratio for _, arm in merged if arm.max_downsample == level} or {0.5}
        ratio = nearest(ratios, 0.5)
        words = f"{backend}{level_words(level)}"
        lines += [f"### Time by size and batch, ratio {ratio:g}, {words}", ""]
        lines += [*layouts.by_size_and_batch(cases, backend, ratio, level), ""]
        lines += [*(layouts.theirs_by_size(sizes) if has_theirs else [layouts.link_to(DIFFUSERS)]), ""]
        memory = layouts.memory_by_size_and_batch(cases, backend, ratio, level)
        lines += [f"### Peak memory by size and batch, ratio {ratio:g}, {words}", "", *memory, ""] if memory else []
        if len(ratios) > 1:
            lines += _by_batch(cases, backend, sorted({ratio, max(ratios)}), level, has_theirs)
            fullest = _fullest(cases, backend)
            lines += [f"### Time and memory by ratio, {fullest.shape}, {words}", ""]
            lines += [*layouts.by_ratio(fullest, backend, level), "", layouts.link_to(TOMESD), ""]
            others = [case for case in cases if case is not fullest]
            lines += ["<details><summary>The same for the other cases</summary>", ""] if others else []
            for case in others:
                lines += [f"{case.shape}:", "", *layouts.by_ratio(case, backend, level), ""]
            lines += ["</details>", ""] if others else []
        has_theirs = False
    return lines


def _by_batch(
    cases: Sequence[Case], backend: str, ratios: Sequence[float], level: int | None, has_theirs: bool
) -> list[str]:
    lines = []
    for size in sorted({case.size for case in cases}):
        of_size = [case for case in cases if case.size == size]
        if len(of_size) == 1:
            continue  # the table by ratio says it all
        words = " / ".join(f"{ratio:g}" for ratio in ratios)
        lines += [f"### Time by batch, {size} px, ratio {words}, {backend}{level_words(level)}", ""]
        lines += [*layouts.by_batch(of_size, backend, ratios, level), ""]
        lines += [*(layouts.theirs_by_batch({size}) if has_theirs else [layouts.link_to(PPDIFFUSERS)]), ""]
    return lines


def _sources(group: Group, output: Path | None) -> list[str]:
    lines = []
    for result in group.results:
        about = result.environment
        packages = [
            f"{name} {about[name]}" for name in PACKAGES if about.get(name, "not installed") != "not installed"
        ]
        cores = f"threads: {result.threads}, cores: {about.get('cores')}"
        machine = f"{about.get('machine')}, {about.get('device')}, {cores}"
        versions = ", ".join([*packages, f"Python {about.get('python')}"])
        lines.append(
            f"- {_link(result.path, output)}: {machine}; {versions}; commit {result.commit}; "
            f"{result.rounds} rounds; `{result.command}`"
        )
    return lines


def _link(file: Path, output: Path | None) -> str:
    target = Path(os.path.relpath(file, output)) if output else file
    return f"[{file.name}]({quote(target.as_posix())})"
