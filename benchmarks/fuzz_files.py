"""Seeded damages of every file of an export: each is refused in one clear error, or draws what the whole export draws.

    python benchmarks/fuzz_files.py --model build/load --count 300 --seed 0

Half of the damages are of tome.json, the others of all files in turn. Each folder is loaded in a process that may
crash. What loads is drawn by `generate`, and so is a tenth of the rest, which must end with status 2. The exit status
is 1 after a finding: a traceback, a crash, a hang, a failed image, or one that differs from the whole export's.
"""

import argparse
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from random import Random

SECONDS = 120  # after which a folder counts as one that hangs or crashes
LEVELS = 8  # of 255, by which an image may differ on average: without oneDNN it is rounded otherwise
WRONG = (None, True, -1, 0, 7, 0.25, 1e308, 10**30, 10**400, float("nan"), [], {}, [[]], [1, 2], {"a": None})
WRONG += ("", "a", "0", "é", "\0", "../x", "/etc/passwd", "x" * 100_000)


def flip(content: bytes, random: Random) -> bytes:
    """One bit."""
    at = random.randrange(len(content))
    return _replace(content, at, bytes([content[at] ^ 1 << random.randrange(8)]))


def overwrite(content: bytes, random: Random) -> bytes:
    """Random bytes, up to 16 of them."""
    return _replace(content, random.randrange(len(content)), random.randbytes(random.randint(1, 16)))


def blank(content: bytes, random: Random) -> bytes:
    """Zeros, as in a hole of the file system."""
    return _replace(content, random.randrange(len(content)), bytes(random.choice((1, 512, 4096))))


def cut(content: bytes, random: Random) -> bytes:
    """The beginning alone, or nothing."""
    return content[: random.choice((0, random.randrange(len(content)), len(content) - 1))]


def grow(content: bytes, random: Random) -> bytes:
    """More than there was."""
    return content + random.choice((b"\n", b"}", random.randbytes(9)))


def delete(content: bytes, random: Random) -> None:
    """No file."""


def invalid_utf8(content: bytes, random: Random) -> bytes:
    """A byte that no UTF-8 has."""
    at = random.randrange(len(content))
    return content[:at] + b"\xff" + content[at:]


def nest(content: bytes, random: Random) -> bytes:
    """A value that is nested deeply."""
    spot = random.choice([*re.finditer(rb": ", content)] or [re.match(b"", content)]).end()
    return (
        content[:spot] + random.choice((b"[" * 100_000, b'{"a":' * 100_000, b"[" * 999 + b"]" * 999)) + content[spot:]
    )


def edit(content: bytes, random: Random) -> bytes:
    """One value of a JSON file: another, none, twice, under another key, or beside one that is unknown."""
    data = json.loads(content)
    while True:
        holder, key = random.choice(_places(data))
        choice = random.choice(("other", "other", "other", "none", "key", "more"))
        if choice == "other":
            holder[key] = random.choice(WRONG)
        elif choice == "none":
            del holder[key]
        elif isinstance(holder, list):
            holder.append(holder[key])
        elif choice == "key":
            holder[random.choice(("", "a", "é", f"{key} ", "../" + key))] = holder.pop(key)
        else:
            holder["unknown"] = holder[key]
        return json.dumps(data, indent=2).encode()


ANY = (flip, overwrite, blank, cut, grow, delete)
JSON = (*ANY, invalid_utf8, nest, edit, edit, edit, edit, edit, edit, edit, edit)


def cases(model: Path, count: int, seed: int):
    """Number, path, kind and damaged content (None: no file) of each damage; the same for the same seed."""
    paths = sorted(path for path in model.rglob("*") if path.is_file() and path.name != "tome.json")
    for number in range(count):
        random = Random(f"{seed} {number}")
        path = model / "tome.json" if number % 2 == 0 else paths[number // 2 % len(paths)]
        kind = random.choice(JSON if path.suffix == ".json" else ANY)
        content = path.read_bytes()
        while (damaged := kind(content, random)) == content:  # zeros over zeros, a value by itself
            pass
        yield number, path.relative_to(model), kind.__name__, damaged


def write_case(model: Path, path: Path, damaged: bytes | None, folder: Path) -> None:
    """A folder like the model's, by hard links, but for one file."""
    shutil.copytree(model, folder, copy_function=os.link)
    (folder / path).unlink()
    if damaged is not None:
        (folder / path).write_bytes(damaged)


def load(folder: Path) -> str:
    """ "loaded" or "refused", or the traceback of anything but one clear error."""
    from ppdiffusers_tome import ToMeExportError
    from ppdiffusers_tome.inference import load_pipeline, read_manifest

    try:
        read_manifest(folder)
        load_pipeline(folder, threads=1)
    except ToMeExportError as error:
        return "refused" if len(str(error)) < 2000 else f"a message of {len(str(error))} characters"
    except BaseException:
        return traceback.format_exc()
    return "loaded"


def draw(folder: Path, out: Path) -> str:
    """What `generate` makes of a folder: "drawn", "refused", or what is wrong about it."""
    from ppdiffusers_tome.cli import main

    (prompts := folder.parent / "prompts.txt").write_text("a 3d render of fox\n")
    given = ["--model", folder, "--prompts", prompts, "--out", out, "--steps", 2, "--guidance", 2, "--threads", 1]
    with redirect_stderr(StringIO()) as printed, redirect_stdout(printed):
        try:
            status = main(["generate", *map(str, given)])
        except BaseException:
            return traceback.format_exc()
    made = len(list(out.glob("*.png"))) if out.exists() else 0
    if "Traceback" in printed.getvalue() or (status, made) not in ((0, 1), (2, 0)):
        return f"status {status}, {made} images: {printed.getvalue()}"
    return "drawn" if made else "refused"


def difference(one: Path, other: Path) -> float:
    """Mean difference of the only images of two folders, in levels of 255; 255 where their sizes differ."""
    import numpy as np
    from PIL import Image

    first, second = (np.asarray(Image.open(next(folder.glob("*.png")))).astype(float) for folder in (one, other))
    return float(np.abs(first - second).mean()) if first.shape == second.shape else 255.0


class Worker:
    """A process that runs functions and may crash."""

    def __init__(self) -> None:
        self._pool = None

    def __call__(self, function, *arguments):
        self._pool = self._pool or multiprocessing.get_context("spawn").Pool(1)
        try:
            return self._pool.apply_async(function, arguments).get(SECONDS)
        except multiprocessing.TimeoutError:
            self._pool.terminate()
            self.close()
            return f"{function.__name__} crashed or took longer than {SECONDS} s"

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool.join()
        self._pool = None


def check(worker: Worker, folder: Path, work: Path, is_sampled: bool) -> str:
    """ "refused" or "drawn", or what is wrong about a damaged folder."""
    outcome = worker(load, folder)
    if outcome == "loaded" or (outcome == "refused" and is_sampled):
        drawn = worker(draw, folder, work / "images")
        if outcome == "refused" or drawn != "drawn":
            return drawn if drawn == outcome else f"{outcome} by load_pipeline, by generate: {drawn}"
        far = difference(work / "whole", work / "images")
        return "drawn" if far <= LEVELS else f"the image differs by {far:.1f} levels"
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="what `python -m ppdiffusers_tome export` wrote")
    parser.add_argument("--count", type=int, default=300, help="damages")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="number of the one damage to try")
    options = parser.parse_args()
    outcomes: Counter[str] = Counter()
    worker = Worker()
    with tempfile.TemporaryDirectory(dir=options.model.parent) as folder:
        work = Path(folder)
        if (drawn := worker(draw, options.model, work / "whole")) != "drawn":
            sys.exit(f"{options.model} itself cannot be drawn: {drawn}")
        for number, path, kind, damaged in cases(options.model, options.count, options.seed):
            if options.only not in (None, number):
                continue
            write_case(options.model, path, damaged, work / "case")
            outcome = check(worker, work / "case", work, number % 10 == 0)
            if outcome not in ("refused", "drawn"):
                print(f"FOUND damage {number}, {kind} of {path}: {outcome}", flush=True)
            outcomes[outcome if outcome in ("refused", "drawn") else "found"] += 1
            shutil.rmtree(work / "case")
            shutil.rmtree(work / "images", ignore_errors=True)
    worker.close()
    print(", ".join(f"{number} {outcome}" for outcome, number in sorted(outcomes.items())))
    return 1 if outcomes["found"] else 0


def _places(data):
    """Every (holder, key) of JSON data."""
    pairs = [*data.items()] if isinstance(data, dict) else [*enumerate(data)] if isinstance(data, list) else []
    return [place for key, value in pairs for place in [(data, key), *_places(value)]]


def _replace(content: bytes, at: int, new: bytes) -> bytes:
    return (content[:at] + new + content[at + len(new) :])[: len(content)]


if __name__ == "__main__":
    sys.exit(main())
