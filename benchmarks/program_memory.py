"""Memory of a UNet's programs over their number, in each runtime, and the time to load them.

    python benchmarks/program_memory.py measure --model examples/emoji_sd --size 128 192
    python benchmarks/program_memory.py measure --architecture sd15 --size 256 320
    python benchmarks/program_memory.py serve --model examples/emoji_sd --size 128 192
    python benchmarks/program_memory.py report

Each figure comes from processes of their own, which load the first programs of one export (sizes × ratios 0.5, 0.25,
0.75, 0) as `load_pipeline` does and run each once, batch 2. Memory is PSS: what is mapped several times counts once,
and what several processes share counts in equal parts. That of the process before the first program is subtracted. The
programs of the committed results merge by the default method of 2.x.

`serve` is the command with so many programs: the seconds from its start until `/ready` answers 200, and the PSS of the
whole process once each program has generated an image of one step; medians of three starts, in turns with one program
and with all.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import paddle
import requests
from lab.markdown import table
from lab.speed.architectures import ARCHITECTURES
from ppdiffusers import StableDiffusionPipeline

from ppdiffusers_tome.comparison.results import make_result, read_json, write_result
from ppdiffusers_tome.export.loading import load_eager_pipeline
from ppdiffusers_tome.inference import export_pipeline, load_pipeline, read_manifest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks" / "tools"))
from server_process import start_server  # noqa: E402

RATIOS = (0.5, 0.25, 0.75, 0)
COUNTS = (1, 2, 4, 8)
RUNTIMES = ("paddle", "onnxruntime", "openvino")
STARTS = 3  # timed starts of `serve`
MAX_PROGRAMS = 2  # in the measurement with `max_programs`


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
    bound = None if most is None else int(most)
    pipe = load_pipeline(folder, runtime=runtime, threads=1, verify=False, max_programs=bound)
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


def proportional_bytes(process: int | str = "self") -> int:
    """The proportional set size of a process."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def serve(folder: Path, runtime: str) -> dict[str, Any]:
    """Seconds until a server with the programs of a folder is ready, and its bytes when each has been used."""
    command = [sys.executable, "-m", "ppdiffusers_tome", "serve", "--model", str(folder), "--port", "0"]
    command += ["--threads", "1", "--no-verify", "--runtime", runtime]
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as logs:
        process, url = start_server(command, Path(logs, "log"))
        seconds = time.perf_counter() - start
        for file in read_manifest(folder).programs_of("unet"):
            body = {"prompt": "a fox", "steps": 1, "size": str(file.size), "tome_ratio": file.ratio}
            requests.post(f"{url}/v1/images/generations", json=body, timeout=300).raise_for_status()
        memory = proportional_bytes(process.pid)
        process.terminate()
        process.wait()
    return {"seconds": seconds, "bytes": memory}


def measure_serve(options: argparse.Namespace) -> None:
    """Add starts of `serve` to a result: for each runtime, with one program and with all, medians of both in turns."""
    folders = [export(options, 1), export(options)]
    path, rows = options.output / f"program_memory_{folders[1].name}.json", []
    for runtime in options.runtime:
        starts = [[serve(folder, runtime) for folder in folders] for _ in range(1 + STARTS)][1:]  # the first warms up
        for folder, each in zip(folders, zip(*starts, strict=True), strict=True):
            about = {"runtime": runtime, "programs": len(read_manifest(folder).programs_of("unet"))}
            rows.append(about | {name: statistics.median(start[name] for start in each) for name in each[0]})
            print(rows[-1])
    command = shlex.join(["python", "benchmarks/program_memory.py", *sys.argv[1:]])
    write_result(path, {**read_json(path), "serve": make_result("experiments", command, rows=rows)})


def export(options: argparse.Namespace, most: int = len(RATIOS)) -> Path:
    """The folder of the export, which a repeated run uses again, with so many of the ratios and sizes."""
    folder = ROOT / "build" / "program_memory" / (options.architecture or Path(options.model).name)
    folder = folder if most == len(RATIOS) else folder.with_name(f"{folder.name}_{most}")
    if not (folder / "tome.json").is_file():
        pipe = load_eager_pipeline(options.model)
        if options.architecture:
            unet = ARCHITECTURES[options.architecture].build()
            unet.eval()
            pipe = StableDiffusionPipeline(**{**pipe.components, "unet": unet}, requires_safety_checker=False)
        sizes = [(side, side) for side in options.size[:most]]
        export_pipeline(pipe, folder, RATIOS[:most], sizes, format="both")
    return folder


def measure(options: argparse.Namespace) -> None:
    """Measure and write the result after each row; rows that it has are not measured again."""
    folder = export(options)
    path = options.output / f"program_memory_{folder.name}.json"
    rows = read_json(path)["rows"] if path.is_file() else []
    cases = [(runtime, count, None, 1) for runtime in options.runtime for count in options.count]
    cases += [(runtime, COUNTS[-1], MAX_PROGRAMS, 1) for runtime in options.runtime]
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


def memory_table(rows: list[dict[str, Any]], timed: str) -> list[str]:
    """The lines of a table of memory and time for one program and for the most, with memory against that of one."""
    one = {row["runtime"]: row for row in rows if row["programs"] == 1}
    most = max(row["programs"] for row in rows)
    cells = []
    for row in rows:
        if row["programs"] not in (1, most):
            continue
        base, name = one[row["runtime"]], row["runtime"]
        name += f", max_programs {row['max_programs']}" if row.get("max_programs") else ""
        name += f", each of {row['processes']} processes" if row.get("processes", 1) > 1 else ""
        if "error" in row:
            cells.append([name, str(row["programs"]), row["error"], "–", "–"])
            continue
        ratio = row["bytes"] / base["bytes"]
        figures = [f"{row['bytes'] / 2**20:,.0f}", f"{ratio:.2f}×", f"{row['seconds']:.1f}"]
        cells.append([name, str(row["programs"]), *figures])
    return table(["runtime", "programs", "MiB", "against one", f"s to {timed}"], cells)


def report(options: argparse.Namespace) -> None:
    """Write `program_memory.md`, beside the folder of the results."""
    lines = [f"# Memory of a UNet's programs{chr(10)}", *(__doc__ or "").split("\n\n")[2:]]
    for path in sorted(options.output.glob("program_memory_*.json")):
        result = read_json(path)
        about = result["environment"]
        lines += [
            f"## `{result['model']}`, weights of {result['weights'] / 2**20:,.0f} MiB\n",
            *memory_table(result["rows"], "load and run once"),
            f"\n[{path.name}](results/{path.name}): {about['machine']}, Paddle {about['paddlepaddle']}, ONNX Runtime "
            f"{about['onnxruntime']}, OpenVINO {about['openvino']}\n",
        ]
        if served := result.get("serve"):
            lines += [f"`serve` (commit `{served['commit']}`, {served['environment']['machine']}):\n"]
            lines += [*memory_table(served["rows"], "`/ready`"), ""]
    (options.output.parent / "program_memory.md").write_text("\n".join(lines), encoding="utf-8")


def main() -> None:
    if sys.argv[1:2] == ["process"]:
        run_process(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["measure", "serve", "report"])
    parser.add_argument("--model", default=str(ROOT / "examples" / "emoji_sd"), help="default: %(default)s")
    parser.add_argument("--architecture", choices=ARCHITECTURES, help="a UNet with random weights in its place")
    parser.add_argument("--size", nargs="+", type=int, default=[128, 192], help="px (default: 128 192)")
    parser.add_argument("--count", nargs="+", type=int, default=COUNTS, help="of programs (default: 1 2 4 8)")
    parser.add_argument("--runtime", nargs="+", choices=RUNTIMES, default=[*RUNTIMES], help="default: all")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results", help="default: %(default)s")
    options = parser.parse_args()
    {"measure": measure, "serve": measure_serve, "report": report}[options.command](options)


if __name__ == "__main__":
    main()
