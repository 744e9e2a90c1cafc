"""Time and memory of exports: how much a further ratio and the check of whole images cost.

    python benchmarks/export_cost.py measure before --source ../earlier
    python benchmarks/export_cost.py measure after
    python benchmarks/export_cost.py images
    python benchmarks/export_cost.py report

`measure` runs `python -m ppdiffusers_tome export` of a checkout for each of `EXPORTS`, one after another, and adds the
figures to the result. Memory is the PSS of the command and its processes, every second; its largest value
counts, and images are not compared. `measure --unet` ends each export when its UNets are written, and adds the peak of
their memory, which does not depend on what else the machine does. `images` measures exports that compare images, as
they do by default, how much of their time that takes, and their size on the disk. Stable Diffusion 1.5 has random
weights, and is written to build/ first (4 GB).
`report` prints the table of `measure`.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from lab.markdown import table
from lab.result_files import make_result, read_json
from sd15_rehearsal import EXPORT, MODEL, build, watched

from ppdiffusers_tome.comparison.results import write_result

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "export_cost.json"
IMAGE_CHECK = RESULT.with_name("image_check.json")
SD15 = ROOT / MODEL
OF_SD15 = ["--model", str(SD15), "--no-safety-checker", "--ratio", "0.75", "0"]
SD15_512 = "Stable Diffusion 1.5 at 512 px, two ratios"
EXPORTS = {  # by what stands in the table
    "`scenes_sd`, one ratio": ["--model", "examples/scenes_sd", "--ratio", "0.75"],
    "`scenes_sd`, three ratios": ["--model", "examples/scenes_sd", "--ratio", "0.75", "0.5", "0"],
    "`scenes_sd`, four ratios": ["--model", "examples/scenes_sd", "--ratio", "0.75", "0.5", "0.875", "0"],
    SD15_512: [*OF_SD15, "--size", "512"],
}
EXPORTS_WITH_IMAGES = {
    "`scenes_sd`, two ratios, `--img2img`": ["--model", "examples/scenes_sd", "--ratio", "0.75", "0", "--img2img"],
    SD15_512: EXPORTS[SD15_512],
    "Stable Diffusion 1.5 at 768 px, two ratios": [*OF_SD15, "--size", "768"],
    "Stable Diffusion 1.5 at 512 and 1024 px, two ratios, `--img2img`": [
        *OF_SD15,
        "--size",
        "512",
        "1024",
        "--img2img",
    ],
}


def measure(arguments: list[str], source: Path, is_unet: bool, keep: Path | None = None) -> dict[str, float]:
    """Seconds, peak bytes and bytes on the disk of an export by the code of a checkout, or the peak of its UNets.

    If it compares images, also the seconds from then on, in which it does little else. `keep` is where the export
    stays, if anywhere.
    """
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as scratch, open(f"{scratch}/log", "w+") as log:
        command = [sys.executable, "-m", "ppdiffusers_tome", "export", *arguments, "--output", f"{scratch}/export"]
        start, compares, has_unets = time.perf_counter(), None, False
        process = psutil.Popen(command, cwd=source, stderr=log, env={**os.environ, "PYTHONPATH": str(source)})
        with watched(process) as figures:
            while process.poll() is None:
                time.sleep(0.2)
                lines = Path(log.name).read_text(errors="replace")
                if compares is None and "comparing images" in lines:
                    compares = time.perf_counter()
                if is_unet and "exporting text_encoder" in lines:
                    has_unets = True
                    process.terminate()
                    process.wait()
        if has_unets:
            return {"unet_peak_bytes": figures["peak_bytes"]}
        if process.returncode:
            text = Path(log.name).read_text(errors="replace")
            raise subprocess.CalledProcessError(process.returncode, command, text)
        written = Path(scratch, "export")
        disk = sum(file.stat().st_size for file in written.rglob("*") if file.is_file())
        if keep is not None:
            shutil.rmtree(keep, ignore_errors=True)
            written.rename(keep)
    of_images = {} if compares is None else {"image_check_seconds": start + figures["seconds"] - compares}
    return {**figures, **of_images, "disk_bytes": disk}


def commit_of(source: Path) -> str:
    """The commit of a checkout."""
    return subprocess.check_output(["git", "-C", str(source), "rev-parse", "HEAD"], text=True).strip()


def report(result: dict[str, Any]) -> str:
    """The table of a result."""
    rows = []
    for name, by_code in result["exports"].items():
        cells = [f"{by_code[code]['seconds']:.0f} s" for code in ("before", "after")]
        for peak in ("peak_bytes", "unet_peak_bytes"):
            cells += [f"{by_code[code][peak] / 1e9:.1f} GB" for code in ("before", "after")]
        rows.append([name, *cells])
    whats, whens = ("time", "peak", "peak of UNets"), ("before", "after")
    return "\n".join(table(["export", *(f"{what} {when}" for what in whats for when in whens)], rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    one = modes.add_parser("measure")
    one.add_argument("code", choices=["before", "after"])
    one.add_argument("--source", type=Path, default=ROOT, help="the checkout (default: this one)")
    one.add_argument("--only", nargs="+", choices=EXPORTS, default=[*EXPORTS], help="default: all")
    one.add_argument("--unet", action="store_true", help="the peak of memory until all UNets are written")
    images = modes.add_parser("images")
    images.add_argument("--only", nargs="+", choices=EXPORTS_WITH_IMAGES, default=[*EXPORTS_WITH_IMAGES])
    modes.add_parser("report")
    options = parser.parse_args()
    earlier = read_json(RESULT) if RESULT.is_file() else {"exports": {}}
    if options.mode == "report":
        return print(report(earlier))
    if not SD15.is_dir():
        build(SD15)
    if options.mode == "images":
        measured = read_json(IMAGE_CHECK)["exports"] if IMAGE_CHECK.is_file() else {}
        for name in options.only:
            keep = ROOT / EXPORT if name == SD15_512 else None  # sd15_rehearsal.py goes on with it
            figures = measure(EXPORTS_WITH_IMAGES[name], ROOT, is_unet=False, keep=keep)
            measured[name] = {**figures, "commit": commit_of(ROOT)}
            print(name, measured[name], flush=True)
            write_result(
                IMAGE_CHECK, make_result("image_check", "python benchmarks/export_cost.py images", exports=measured)
            )
        return None
    source = options.source.resolve()
    # The code of before compares no images.
    without = [] if options.code == "before" else ["--no-image-check"]
    exports: dict[str, Any] = {name: dict(earlier["exports"].get(name, {})) for name in EXPORTS}
    for name in options.only:
        figures = {**measure([*EXPORTS[name], *without], source, options.unet), "commit": commit_of(source)}
        exports[name][options.code] = exports[name].get(options.code, {}) | figures
        print(name, exports[name][options.code], flush=True)
        write_result(RESULT, make_result("export_cost", "python benchmarks/export_cost.py measure", exports=exports))


if __name__ == "__main__":
    main()
