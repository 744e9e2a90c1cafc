"""Generate many images without a server, in batches, so that a killed run can be resumed."""

import fcntl
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from tqdm import tqdm

from ..errors import ToMeError
from ..files import UNFINISHED, write_file
from ..progress import StepLines
from ..run.folder import sha256
from ..run.manifest import MANIFEST
from .image_engine import ImageEngine
from .jobs import AbandonedError, EngineLostError
from .png import encode_png
from .prompt_file import Prompt

LOCK = ".ppdiffusers_tome.lock"
REPORTS = 20  # lines about the progress of a run, outside of a terminal
PNG_START, PNG_END = b"\x89PNG\r\n\x1a\n", b"\0\0\0\0IEND\xaeB`\x82"


# A prompt with its PNG file, or with the reason why it could not be generated.
ImageResult: TypeAlias = tuple[Prompt, bytes | str]
ImageResults: TypeAlias = Generator[ImageResult, None, None]
# Generates the images of batches of prompts, in any order, until its generator is closed.
ImageBackend: TypeAlias = Callable[[Sequence[Sequence[Prompt]]], ImageResults]
# Makes a backend from a function that loads an engine, in the process that needs it.
MakeImageBackend: TypeAlias = Callable[[Callable[[], ImageEngine]], ImageBackend]


@dataclass
class Summary:
    """Numbers of generated and of skipped images, and the failures with their reasons."""

    made: int = 0
    skipped: int = 0
    failures: list[tuple[Prompt, str]] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.made} made, {self.skipped} skipped (already there), {len(self.failures)} failed"


class OutputError(ToMeError, RuntimeError):
    """The output folder cannot be written, or another run writes to it."""


def model_hash(model: Path, runtime: Mapping[str, str]) -> str:
    """A hash of an exported folder, by its `tome.json`, and of the runtime, which also affects the images."""
    content = json.dumps([sha256(model / MANIFEST), runtime], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def generate(prompts: Sequence[Prompt], identity: str, output: Path, batch: int, backend: ImageBackend) -> Summary:
    """Generate the images that are not in the output folder yet.

    Args:
        prompts: the complete list.
        identity: hash of the model and its runtime, from `model_hash`; part of the images' names.
        output: folder for the images; created if it does not exist.
        batch: largest number of images in one pipeline call.
        backend: from `generate_here` or `ray_engines.generate_on_ray`.

    Raises:
        OutputError: a file cannot be written, or another run uses the folder.
    """
    paths = {prompt: output / prompt.file_name(identity) for prompt in prompts}
    summary = Summary()
    with _folder(output):
        missing = {prompt for prompt, path in paths.items() if not _is_complete_png(path)}
        summary.skipped = len(prompts) - len(missing)
        # Rounding depends on the batch size. So the complete list is split into batches, and a batch with a missing
        # image is repeated: a resumed run writes the same bytes as an uninterrupted run.
        batches = [members for members in split(prompts, batch) if not missing.isdisjoint(members)]
        # The backend is closed as soon as an image cannot be written, so that its workers end before Ray does.
        with closing(backend(batches)) as results, _progress(len(prompts), summary.skipped) as advance:
            for prompt, result in results:
                if prompt not in missing:
                    continue
                if isinstance(result, str):
                    summary.failures.append((prompt, result))
                else:
                    _write(paths[prompt], result)
                    summary.made += 1
                advance()
    return summary


@contextmanager
def _progress(total: int, done: int) -> Iterator[Callable[[], None]]:
    """A function to call after each image: it moves a bar in a terminal, and prints about REPORTS lines elsewhere.

    Args:
        total: images of the run.
        done: those that are already there.
    """
    if sys.stderr.isatty():
        with tqdm(total=total, initial=done, unit="image") as bar:
            yield lambda: bar.update() and None
        return
    start, made, every = time.monotonic(), 0, max(1, (total - done) // REPORTS)

    def advance() -> None:
        nonlocal made
        made += 1
        if made % every == 0 or done + made == total:
            elapsed = time.monotonic() - start
            left = tqdm.format_interval(elapsed / made * (total - done - made))
            line = f"{done + made} of {total} images, {tqdm.format_interval(elapsed)} so far, about {left} left"
            print(line, file=sys.stderr, flush=True)

    yield advance


def split(prompts: Sequence[Prompt], batch: int) -> list[list[Prompt]]:
    """Batches of prompts with equal `batch_key`, in the order of their first prompts."""
    batches: list[list[Prompt]] = []
    unfilled: dict[tuple[Any, ...] | None, list[Prompt]] = {}
    for prompt in prompts:
        key = prompt.job.batch_key
        if len(unfilled.get(key, ())) in (0, batch):
            unfilled[key] = []
            batches.append(unfilled[key])
        unfilled[key].append(prompt)
    return batches


def generate_here(load: Callable[[], ImageEngine]) -> ImageBackend:
    """A backend with an engine in this process. It is loaded for the first batch, and stderr says so."""

    def run(batches: Sequence[Sequence[Prompt]]) -> ImageResults:
        engine: ImageEngine | None = None
        lines = StepLines()
        for number, batch in enumerate(batches, 1):
            if engine is None:
                tqdm.write("loading the model", file=sys.stderr)
                engine = load()
            label = f"batch {number} of {len(batches)}, step"
            yield from generate_batch(engine, batch, partial(lines.report, label))

    return run


def generate_batch(
    engine: ImageEngine, batch: Sequence[Prompt], report: Callable[[int, int], None] | None = None
) -> list[ImageResult]:
    """Run a batch, in one call if the engine can. If it fails, run each prompt alone, so that the rest succeeds.

    Args:
        batch: from `split`, or of one prompt.
        report: called after each step of a call with the number of finished steps and of all steps; None for engines
            in another process.

    Raises:
        EngineLostError: the engine is lost, so a different engine must run the batch.
        AbandonedError: the engine was stopped.
    """
    jobs = [prompt.job for prompt in batch]

    def after_step(done: int, total: int) -> bool:
        if report is not None and done:  # none before the first step
            report(done, total)
        return False

    if len(batch) == 1 or (engine.can_batch and jobs[0].batch_key is not None):
        try:
            images = engine.generate(jobs, None if report is None else after_step)
        except (EngineLostError, AbandonedError):
            raise
        except Exception as error:  # anything from Paddle: the remaining prompts may still succeed
            if len(batch) == 1:
                return [(batch[0], f"{type(error).__name__}: {error}")]
        else:
            return [
                (prompt, encode_png(image, prompt.job, engine)) for prompt, image in zip(batch, images, strict=True)
            ]
    return [result for prompt in batch for result in generate_batch(engine, [prompt], report)]


def _write(path: Path, content: bytes) -> None:
    try:
        write_file(path, content)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}. Images written before stay.") from error


def _is_complete_png(path: Path) -> bool:
    """Whether a file begins and ends like a PNG file, so that it was not truncated."""
    try:
        with path.open("rb") as file:
            signature = file.read(len(PNG_START))
            file.seek(-len(PNG_END), os.SEEK_END)
            return signature == PNG_START and file.read() == PNG_END
    except OSError:  # absent, or too short to seek
        return False


@contextmanager
def _folder(output: Path) -> Iterator[None]:
    """Lock the folder against other runs, and remove unfinished files of a killed run."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        lock = (output / LOCK).open("w")
    except OSError as error:
        raise OutputError(f"{output} cannot be written: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system releases it when the process ends
        except OSError:
            raise OutputError(f"another run writes to {output}: wait for it, or choose another folder") from None
        for leftover in output.glob(f"{UNFINISHED}*.png"):
            leftover.unlink()
        yield
