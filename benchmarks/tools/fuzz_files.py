"""Damage the files of an export at random: loading must fail with one clear error, or the images must not change.

    python benchmarks/tools/fuzz_files.py --model build/load --count 300 --seed 0

Half of the damages are to tome.json, the others to all files in turn. Each damaged folder is loaded in a process that
may crash. If it loads, `generate` must write the intact export's image; in a tenth of the other cases `generate` must
end with an error. The exit status is 1 after a finding: a traceback, a crash, a hang, a failed or a different image.
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

CACHE = "optimized"  # what ONNX Runtime makes of an export beside its programs, and makes again when it is damaged
SECONDS = 120  # after which loading counts as hung or crashed
LEVELS = 8  # largest mean difference of equal images, in levels of 255: rounding differs without oneDNN
WRONG = (None, True, -1, 0, 7, 0.25, 1e308, 10**30, 10**400, float("nan"), [], {}, [[]], [1, 2], {"a": None})
WRONG += ("", "a", "0", "é", "\0", "../x", "/etc/passwd", "x" * 100_000)


def flip(content: bytes, random: Random) -> bytes:
    """Flip one bit."""
    at = random.randrange(len(content))
    return _replace(content, at, bytes([content[at] ^ 1 << random.randrange(8)]))


def overwrite(content: bytes, random: Random) -> bytes:
    """Replace up to 16 bytes by random ones."""
    return _replace(content, random.randrange(len(content)), random.randbytes(random.randint(1, 16)))


def blank(content: bytes, random: Random) -> bytes:
    """Replace bytes by zeros, like a hole in a sparse file."""
    return _replace(content, random.randrange(len(content)), bytes(random.choice((1, 512, 4096))))


def cut(content: bytes, random: Random) -> bytes:
    """Truncate the file."""
    return content[: random.choice((0, random.randrange(len(content)), len(content) - 1))]


def grow(content: bytes, random: Random) -> bytes:
    """Append bytes."""
    return content + random.choice((b"\n", b"}", random.randbytes(9)))


def delete(content: bytes, random: Random) -> None:
    """Delete the file."""


def invalid_utf8(content: bytes, random: Random) -> bytes:
    """Insert a byte that is not UTF-8."""
    at = random.randrange(len(content))
    return content[:at] + b"\xff" + content[at:]


def nest(content: bytes, random: Random) -> bytes:
    """Insert a deeply nested value."""
    at = random.choice([*re.finditer(rb": ", content)] or [re.match(b"", content)]).end()
    nested = random.choice((b"[" * 100_000, b'{"a":' * 100_000, b"[" * 999 + b"]" * 999))
    return content[:at] + nested + content[at:]


def edit(content: bytes, random: Random) -> bytes:
    """Change one value of a JSON file: replace, delete, repeat or rename it, or add an unknown one."""
    data = json.loads(content)
    while True:
        container, key = random.choice(_places(data))
        choice = random.choice(("replace", "replace", "replace", "delete", "rename", "add"))
        if choice == "replace":
            container[key] = random.choice(WRONG)
        elif choice == "delete":
            del container[key]
        elif isinstance(container, list):
            container.append(container[key])
        elif choice == "rename":
            container[random.choice(("", "a", "é", f"{key} ", "../" + key))] = container.pop(key)
        else:
            container["unknown"] = container[key]
        return json.dumps(data, indent=2).encode()


ANY = (flip, overwrite, blank, cut, grow, delete)
JSON = (*ANY, invalid_utf8, nest, edit, edit, edit, edit, edit, edit, edit, edit)


def damages(model: Path, count: int, seed: int):
    """Number, path, kind and new content (None: no file) of each damage; the same for the same seed."""
    files = sorted(path for path in model.rglob("*") if path.is_file() and path.name != "tome.json")
    paths = [path for path in files if CACHE not in path.relative_to(model).parts]
    for number in range(count):
        random = Random(f"{seed} {number}")
        path = model / "tome.json" if number % 2 == 0 else paths[number // 2 % len(paths)]
        kind = random.choice(JSON if path.suffix == ".json" else ANY)
        content = path.read_bytes()
        while (damaged := kind(content, random)) == content:  # for instance zeros over zeros
            pass
        yield number, path.relative_to(model), kind.__name__, damaged


def write_damaged(model: Path, path: Path, damaged: bytes | None, folder: Path) -> None:
    """A copy of the model's folder by hard links, with one damaged file."""
    shutil.copytree(model, folder, copy_function=os.link, ignore=shutil.ignore_patterns(CACHE))
    (folder / path).unlink()
    if damaged is not None:
        (folder / path).write_bytes(damaged)


def load(folder: Path) -> str:
    """ "loaded" or "refused", or the traceback of any other error."""
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


def generate(folder: Path, output: Path) -> str:
    """Run `generate` with a folder: "generated", "refused", or a finding."""
    from ppdiffusers_tome.cli import FAILED, USAGE, main

    (prompts := folder.parent / "prompts.txt").write_text("a 3d render of fox\n")
    arguments = ["--model", folder, "--prompts", prompts, "--output", output, "--threads", 1]
    arguments += ["--steps", 2, "--guidance-scale", 2]
    with redirect_stderr(StringIO()) as printed, redirect_stdout(printed):
        try:
            status = main(["generate", *map(str, arguments)])
        except BaseException:
            return traceback.format_exc()
    made = len(list(output.glob("*.png"))) if output.exists() else 0
    is_refused = status in (FAILED, USAGE) and "\nerror: " in f"\n{printed.getvalue()}" and not made
    if "Traceback" in printed.getvalue() or not (is_refused or (status, made) == (0, 1)):
        return f"status {status}, {made} images: {printed.getvalue()}"
    return "generated" if made else "refused"


def difference(one: Path, other: Path) -> float:
    """Mean difference of the single images of two folders, in levels of 255; 255 if their sizes differ."""
    import numpy as np
    from PIL import Image

    first, second = (np.asarray(Image.open(next(folder.glob("*.png")))).astype(float) for folder in (one, other))
    return float(np.abs(first - second).mean()) if first.shape == second.shape else 255.0


class Worker:
    """Runs functions in a process that may crash."""

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
    """ "refused" or "generated", or a finding about a damaged folder."""
    loaded = worker(load, folder)
    if loaded == "loaded" or (loaded == "refused" and is_sampled):
        generated = worker(generate, folder, work / "images")
        if loaded == "refused" or generated != "generated":
            return generated if generated == loaded else f"{loaded} by load_pipeline, by generate: {generated}"
        levels = difference(work / "intact", work / "images")
        return "generated" if levels <= LEVELS else f"the image differs by {levels:.1f} levels"
    return loaded


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder written by the command export")
    parser.add_argument("--count", type=int, default=300, help="number of damages (default: 300)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="number of the only damage to test")
    options = parser.parse_args()
    outcomes: Counter[str] = Counter()
    worker = Worker()
    with tempfile.TemporaryDirectory(dir=options.model.parent) as folder:
        work = Path(folder)
        if (generated := worker(generate, options.model, work / "intact")) != "generated":
            sys.exit(f"the intact export {options.model} gives no image: {generated}")
        for number, path, kind, damaged in damages(options.model, options.count, options.seed):
            if options.only not in (None, number):
                continue
            write_damaged(options.model, path, damaged, work / "damaged")
            outcome = check(worker, work / "damaged", work, number % 10 == 0)
            if outcome not in ("refused", "generated"):
                print(f"FINDING: damage {number}, {kind} of {path}: {outcome}", flush=True)
                outcome = "findings"
            outcomes[outcome] += 1
            shutil.rmtree(work / "damaged")
            shutil.rmtree(work / "images", ignore_errors=True)
    worker.close()
    print(", ".join(f"{number} {outcome}" for outcome, number in sorted(outcomes.items())))
    return 1 if outcomes["findings"] else 0


def _places(data):
    """Every (container, key) in JSON data."""
    pairs = [*data.items()] if isinstance(data, dict) else [*enumerate(data)] if isinstance(data, list) else []
    return [place for key, value in pairs for place in [(data, key), *_places(value)]]


def _replace(content: bytes, at: int, new: bytes) -> bytes:
    return (content[:at] + new + content[at + len(new) :])[: len(content)]


if __name__ == "__main__":
    sys.exit(main())
