"""Many pictures without a server: batches of a list, drawn in any order, written so that a killed run can go on."""

import fcntl
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from tqdm import tqdm

from ..errors import ToMeError
from ..inference.manifest import MANIFEST, sha256
from ..serving.engine import Engine
from ..serving.pictures import encode_png
from .prompts import Prompt

UNFINISHED = ".unfinished-"  # how the names of files begin that are being written
LOCK = ".ppdiffusers_tome.lock"
PNG_START, PNG_END = b"\x89PNG\r\n\x1a\n", b"\0\0\0\0IEND\xaeB`\x82"


@dataclass(frozen=True)
class Failure:
    """Why a picture could not be drawn."""

    reason: str


# A prompt and its PNG file, or why there is none.
Drawn: TypeAlias = tuple[Prompt, bytes | Failure]
# Draws batches of prompts, in any order.
Drawer: TypeAlias = Callable[[Sequence[Sequence[Prompt]]], Iterable[Drawn]]


@dataclass
class Summary:
    """How many pictures were made and how many were there already; which failed, and why."""

    made: int = 0
    skipped: int = 0
    failures: list[tuple[Prompt, Failure]] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.made} made, {self.skipped} skipped (already there), {len(self.failures)} failed"


class OutputError(ToMeError, RuntimeError):
    """The folder of pictures cannot be written to, or another run writes to it."""


def generate(prompts: Sequence[Prompt], model: Path, output: Path, batch: int, draw: Drawer) -> Summary:
    """Draw what is not in the output folder yet.

    Args:
        prompts: the whole list.
        model: an exported folder; the hash of its `tome.json` is part of the pictures' names.
        output: folder for the pictures; made where it is not there.
        batch: most pictures in one pipeline call.
        draw: `draw_here`, or `actors.draw_on_actors`.

    Raises:
        OutputError: a file cannot be written, or another run has the folder.
    """
    return draw_identified(prompts, sha256(model / MANIFEST), output, batch, draw)


def draw_identified(prompts: Sequence[Prompt], identity: str, output: Path, batch: int, draw: Drawer) -> Summary:
    """`generate` for whatever draws: `identity` is a hash of it, and part of the pictures' names."""
    paths = {prompt: output / prompt.file_name(identity) for prompt in prompts}
    summary = Summary()
    with _folder(output):
        missing = {prompt for prompt, path in paths.items() if not _is_whole_png(path)}
        summary.skipped = len(prompts) - len(missing)
        # The whole list decides who is drawn with whom, and a batch is drawn whole if one of its pictures is missing:
        # rounding depends on the size of the batch, and so would the last bits of pictures that a killed run left out.
        batches = [each for each in split(prompts, batch) if not missing.isdisjoint(each)]
        with tqdm(total=len(prompts), initial=summary.skipped, unit="picture", disable=None) as bar:
            for prompt, drawn in draw(batches) if batches else ():
                if prompt not in missing:
                    continue
                if isinstance(drawn, Failure):
                    summary.failures.append((prompt, drawn))
                else:
                    write(paths[prompt], drawn)
                    summary.made += 1
                bar.update()
    return summary


def split(prompts: Sequence[Prompt], batch: int) -> list[list[Prompt]]:
    """Batches of prompts that agree in size, steps, guidance and ratio, in the order of their first prompts."""
    batches: list[list[Prompt]] = []
    unfilled: dict[tuple[float, ...], list[Prompt]] = {}
    for prompt in prompts:
        job = prompt.job
        key = (job.height, job.width, job.steps, job.guidance_scale, job.ratio)
        if len(unfilled.get(key, ())) in (0, batch):
            unfilled[key] = []
            batches.append(unfilled[key])
        unfilled[key].append(prompt)
    return batches


def draw_here(load: Callable[[], Engine]) -> Drawer:
    """Draw in this process, with one engine, which is loaded when the first batch is due."""

    def draw(batches: Sequence[Sequence[Prompt]]) -> Iterator[Drawn]:
        engine = load()
        for batch in batches:
            yield from draw_batch(engine, batch)

    return draw


def draw_batch(engine: Engine, batch: Sequence[Prompt]) -> list[Drawn]:
    """Draw a batch, together if the engine can; where that fails, one by one, so that one does not fail the others."""
    jobs = [prompt.job for prompt in batch]
    if len(batch) > 1 and engine.batch_key(jobs[0]) is None:
        return [drawn for prompt in batch for drawn in draw_batch(engine, [prompt])]
    try:
        images = engine.generate(jobs)
    except Exception as error:  # whatever Paddle raises: the other prompts can still be drawn
        if len(batch) > 1:
            return [drawn for prompt in batch for drawn in draw_batch(engine, [prompt])]
        return [(batch[0], Failure(f"{type(error).__name__}: {error}"))]
    return [
        (prompt, encode_png(image, prompt.job, engine.name, engine.sampler))
        for prompt, image in zip(batch, images, strict=True)
    ]


def write(path: Path, content: bytes) -> None:
    """Write a file that is either there, whole and on the disk, or not there, whenever the process or machine dies."""
    unfinished = path.with_name(UNFINISHED + path.name)
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}. What was drawn before is kept.") from error


def _is_whole_png(path: Path) -> bool:
    """Whether a file begins and ends as PNG files do; one that was cut short, by whatever, does not."""
    try:
        with path.open("rb") as file:
            signature = file.read(len(PNG_START))
            file.seek(-len(PNG_END), os.SEEK_END)
            return signature == PNG_START and file.read() == PNG_END
    except OSError:  # not there, or too short to seek
        return False


@contextmanager
def _folder(output: Path) -> Iterator[None]:
    """Hold the folder against other runs, and remove what a killed run left half-written."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        lock = (output / LOCK).open("w")
    except OSError as error:
        raise OutputError(f"{output} cannot be written to: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process, however that ends
        except OSError:
            raise OutputError(f"another run draws into {output}: wait for it, or choose another folder") from None
        for leftover in output.glob(f"{UNFINISHED}*.png"):
            leftover.unlink()
        yield
