"""Memory of a UNet's programs over their number, in each runtime, and the time to load them.

    python benchmarks/program_memory.py measure --model examples/emoji_sd --size 128 192
    python benchmarks/program_memory.py measure --architecture sd15 --size 256 320
    python benchmarks/program_memory.py report

Each figure comes from processes of their own, which load the first programs of one export (sizes × ratios 0.5, 0.25,
0.75, 0) as `load_pipeline` does and run each once, batch 2. Memory is PSS: what is mapped several times counts once,
and what several processes share counts in equal parts. That of the process before the first program is subtracted.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import paddle
from ppdiffusers import StableDiffusionPipeline

from ppdiffusers_tome.evaluation.markdown import table
from ppdiffusers_tome.evaluation.results import make_result, read_json, write_result
from ppdiffusers_tome.evaluation.speed.architectures import ARCHITECTURES
from ppdiffusers_tome.inference import export_pipeline, load_pipeline, read_manifest
from ppdiffusers_tome.inference.loading import load_for_export

ROOT = Path(__file__).parents[1]
RATIOS = (0.5, 0.25, 0.75, 0)
COUNTS = (1, 2, 4, 8)
RUNTIMES = {
    "paddle": {"runtime": "paddle"},
    "onnxruntime": {"runtime": "onnxruntime"},
    "openvino": {"runtime": "openvino"},
    "openvino, share_weights": {"runtime": "openvino", "share_weights": True},
}
BOUND = 2  # of the measurement with `max_programs`


def measured(folder: Path, runtime: str, count: int, most: int | None = None, processes: int = 1) -> dict[str, Any]:
    """Seconds and bytes of a process with so many programs, the mean of several; an error if one does not end well."""
    arguments = [str(folder), runtime, str(count), *([] if most is None else [str(most)])]
    command = [sys.executable, __file__, "process", *arguments]
    children = [subprocess.Popen(command, stdin=-1, stdout=-1, text=True) for _ in range(processes)]
    texts = [[child.stdout.readline()] for child in children]  # each has run its programs
    for child, text in zip(children, texts, strict=True):
        if text[0]:
            child.stdin.write("measure\n")
            child.stdin.flush()
            text.append(child.stdout.readline())  # the others still run
    for child in children:
        child.communicate()
    row = {"runtime": runtime, "programs": count, "max_programs": most, "processes": processes}
    if any(child.returncode for child in children):
        return {**row, "error": f"a process ended with status {[child.returncode for child in children]}"}
    results = [json.loads(text[0]) | {"bytes": json.loads(text[1])} for text in texts]
    return row | {name: sum(result[name] for result in results) / processes for name in results[0]}


def run_process(folder: str, runtime: str, count: str, most: str | None = None) -> None:
    """Load programs and run each once, write the seconds; wait for a line, write the memory."""
    manifest = read_manifest(folder)
    pipe = load_pipeline(
        folder, **RUNTIMES[runtime], threads=1, verify=False, max_programs=None if most is None else int(most)
    )
    paddle.seed(0)
    text = paddle.randn([2, 77, pipe.unet.config.cross_attention_dim])
    before, start = proportional_bytes(), time.perf_counter()
    files = manifest.programs_of("unet")[: int(count)]
    for file in files:
        height, width = (side // manifest.vae_factor for side in file.size)
        pipe.unet.ratio = file.ratio
        pipe.unet(paddle.randn([2, 4, height, width]), paddle.to_tensor([500.0]), text)
    seconds = time.perf_counter() - start
    print(json.dumps({"loading_seconds": pipe.unet.loading_seconds, "seconds": seconds}), flush=True)
    sys.stdin.readline()
    print(proportional_bytes() - before, flush=True)
    sys.stdin.readline()


def proportional_bytes() -> int:
    """The proportional set size of this process."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def export(options: argparse.Namespace) -> Path:
    """The folder of the export, which a repeated run uses again."""
    folder = ROOT / "build" / "program_memory" / (options.architecture or Path(options.model).name)
    if not (folder / "tome.json").is_file():
        pipe = load_for_export(options.model)
        if options.architecture:
            unet = ARCHITECTURES[options.architecture].build()
            unet.eval()
            pipe = StableDiffusionPipeline(**{**pipe.components, "unet": unet}, requires_safety_checker=False)
        export_pipeline(pipe, folder, RATIOS, [(size, size) for size in options.size], format="both")
    return folder


def measure(options: argparse.Namespace) -> None:
    """Measure and write the result after each row; rows that it has are not measured again."""
    folder = export(options)
    path = options.output / f"program_memory_{folder.name}.json"
    rows = read_json(path)["rows"] if path.is_file() else []
    cases = [(runtime, count, None, 1) for runtime in options.runtime for count in options.count]
    bounded = [runtime for runtime in options.runtime if "share_weights" not in RUNTIMES[runtime]]
    cases += [(runtime, COUNTS[-1], BOUND, 1) for runtime in bounded]
    cases += [(runtime, max(options.count), None, 2) for runtime in options.runtime]
    command = shlex.join(["python", "benchmarks/program_memory.py", *sys.argv[1:]])
    for runtime, count, most, processes in cases:
        key = {"runtime": runtime, "programs": count, "max_programs": most, "processes": processes}
        if any(key.items() <= row.items() for row in rows):
            continue
        if runtime == "onnxruntime" and count == 1 and processes == 1:
            measured(folder, runtime, COUNTS[-1])  # it writes the optimized programs
        rows.append(measured(folder, runtime, count, most, processes))
        print(rows[-1])
        weights = (folder / "onnx" / "unet.weights").stat().st_size
        write_result(path, make_result("experiments", command, model=folder.name, weights=weights, rows=rows))


def report(options: argparse.Namespace) -> None:
    """Write `program_memory.md`, beside the folder of the results."""
    lines = [f"# Memory of a UNet's programs{chr(10)}", *(__doc__ or "").split("\n\n")[2:]]
    for path in sorted(options.output.glob("program_memory_*.json")):
        result = read_json(path)
        one = {row["runtime"]: row for row in result["rows"] if row["programs"] == 1}
        cells = []
        for row in result["rows"]:
            base, name = one[row["runtime"]], row["runtime"]
            name += f", max_programs {row['max_programs']}" if row["max_programs"] else ""
            name += f", each of {row['processes']} processes" if row["processes"] > 1 else ""
            if "error" in row:
                cells.append([name, str(row["programs"]), row["error"], "–", "–", "–"])
                continue
            ratio, times = row["bytes"] / base["bytes"], row["seconds"] / base["seconds"]
            figures = [
                f"{row['bytes'] / 2**20:,.0f}",
                f"{ratio:.2f}×",
                f"{row['seconds']:.1f}",
                f"{times:.1f}×",
            ]
            cells.append([name, str(row["programs"]), *figures])
        about = result["environment"]
        lines += [
            f"## `{result['model']}`, weights of {result['weights'] / 2**20:,.0f} MiB\n",
            *table(
                ["runtime", "programs", "MiB", "against one", "s to load and run once", "against one, of time"], cells
            ),
            f"\n[{path.name}](results/{path.name}): {about['machine']}, Paddle {about['paddlepaddle']}, ONNX Runtime "
            f"{about['onnxruntime']}, OpenVINO {about['openvino']}; `{result['command']}`\n",
        ]
    (options.output.parent / "program_memory.md").write_text("\n".join(lines), encoding="utf-8")


def main() -> None:
    if sys.argv[1:2] == ["process"]:
        run_process(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["measure", "report"])
    parser.add_argument("--model", default=str(ROOT / "examples" / "emoji_sd"), help="default: %(default)s")
    parser.add_argument("--architecture", choices=ARCHITECTURES, help="a UNet with random weights in its place")
    parser.add_argument("--size", nargs="+", type=int, default=[128, 192], help="px (default: 128 192)")
    parser.add_argument("--count", nargs="+", type=int, default=COUNTS, help="of programs (default: 1 2 4 8)")
    parser.add_argument("--runtime", nargs="+", choices=RUNTIMES, default=[*RUNTIMES], help="default: all")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results", help="default: %(default)s")
    options = parser.parse_args()
    {"measure": measure, "report": report}[options.command](options)


if __name__ == "__main__":
    main()
