"""Put a real server under load: valid, invalid and abandoned requests, idle connections and clients that read nothing.

python benchmarks/load.py --model build/load --seconds 300

Exit status 1, with the reasons, where a request gets no answer or a wrong one, a picture is not what was asked for,
the server's counts differ from the clients', its memory grows, its log holds a traceback, or SIGTERM does not end it
in time while an image is drawn and a client reads nothing. Before the load, one client alone measures what an image
takes at each exported size and ratio.

Memory: before the load each program draws at each batch size, which oneDNN prepares for, and the first quarter of the
time does not count. Then the last quarter's median may lie MEMORY_TOLERANCE above the second quarter's: what the
allocators of Paddle and glibc keep back moves by some MiB. A server that kept one picture of 128x128 (48 KiB) for each
answer would go beyond that tolerance with 700 answers.
"""

import argparse
import contextlib
import itertools
import json
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
from load_clients import DRAWING, OPENAI, UNCOUNTED, Load

from ppdiffusers_tome.evaluation.environment import describe_environment

MIB = 2**20
MEMORY_TOLERANCE = 32 * MIB
TIMEOUT = 120.0  # seconds for a request, and from SIGTERM to the end
# So short a queue that 16 clients fill it, and so small a body that a client's 1.1 MB are too much.
SERVE = ["--port", "0", "--queue", "12", "--batch", "4", "--max-body", "1000000", "--timeout", f"{TIMEOUT:g}"]
STEPS = 20  # of the images that are timed


def start_server(model: Path, log: Path, threads: int) -> tuple[subprocess.Popen, str]:
    """The server as people run it; returns once it is ready."""
    serve = [sys.executable, "-m", "ppdiffusers_tome", "serve", "--model", str(model), "--threads", str(threads)]
    with log.open("w") as file:
        process = subprocess.Popen([*serve, *SERVE], stderr=file, stdout=file)
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        found = re.search(r"listening at (http://\S+)", log.read_text())
        with contextlib.suppress(httpx.ConnectError):  # it may have ended since
            if found and httpx.get(f"{found[1]}/ready", timeout=120).status_code == 200:
                return process, found[1]
        time.sleep(0.5)
    process.kill()
    raise SystemExit(f"the server did not become ready:\n{log.read_text()}")


def time_images(url: str, sizes: list[str], ratios: list[float], images: int) -> dict[str, dict[str, float]]:
    """What an image takes, one after the other, at each size and ratio; then a call of each batch size."""
    measured = {}
    with httpx.Client(base_url=url, timeout=600) as http:

        def draw(size: str, ratio: float, steps: int, n: int) -> float:
            body = {"prompt": "a 3d render of fox", "guidance_scale": 2.0, "seed": 1, "steps": steps, "n": n}
            answer = http.post(OPENAI, json={**body, "size": size, "tome_ratio": ratio}).raise_for_status()
            return answer.elapsed.total_seconds()

        for size, ratio in itertools.product(sizes, ratios):
            seconds = statistics.median(draw(size, ratio, STEPS, 1) for _ in range(images))
            measured[f"{size}, ratio {ratio:g}"] = {
                "seconds an image": round(seconds, 3),
                "images an hour": round(3600 / seconds),
            }
        for size, ratio, batch in itertools.product(sizes, ratios, (2, 3, 4)):
            draw(size, ratio, 1, batch)
    return measured


def run(process: subprocess.Popen, url: str, options: argparse.Namespace) -> dict:
    """All clients at once; then what they saw, against what the server counted."""
    model = httpx.get(f"{url}/v1/models").json()["data"][0]
    if not model["image_to_image"]:
        raise SystemExit(f"{options.model} was exported without --img2img")
    alone = time_images(url, model["sizes"], model["tome_ratios"], options.images)
    load = Load(url, model["sizes"], model["tome_ratios"])
    before = count_requests(read_metrics(url))
    own = 1  # requests of our own for /metrics; a page does not count itself
    end = time.monotonic() + options.seconds
    clients = [threading.Thread(target=load.client, args=(seed, end)) for seed in range(options.clients)]
    clients += [
        threading.Thread(target=each, args=(end,)) for each in (load.idle, load.read_nothing, load.send_garbage)
    ]
    for client in clients:
        client.start()
    memory = []
    while any(client.is_alive() for client in clients):
        memory.append(psutil.Process(process.pid).memory_info().rss)
        time.sleep(0.5)
    idle_by = time.monotonic() + 60
    while total(page := read_metrics(url), "waiting_pictures", "running_pictures") and time.monotonic() < idle_by:
        own += 1
        time.sleep(0.5)
    result = judge(load, memory, page, count_requests(page) - before - own)
    result["violations"] += end_server(process, load)
    return {f"alone, {STEPS} steps": alone, **result}


def end_server(process: subprocess.Popen, load: Load) -> list[str]:
    """What is wrong with the end by SIGTERM, while an image is drawn and a client reads nothing."""
    threading.Thread(target=load.read_nothing, args=(time.monotonic() + 2 * TIMEOUT,), daemon=True).start()
    body = {"prompt": "a 3d render of fox", "steps": 50, "size": load.sizes[-1]}
    with ThreadPoolExecutor() as pool:
        drawing = pool.submit(httpx.post, load.url + OPENAI, json=body, timeout=2 * TIMEOUT)
        while not total(read_metrics(load.url), "running_pictures"):
            time.sleep(0.05)
        start = time.monotonic()
        process.send_signal(signal.SIGTERM)
        try:
            status = process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            return [f"it still runs {TIMEOUT:g} s after SIGTERM"]
        violations = [f"exit status {status} after SIGTERM"] if status else []
        if drawing.exception() or drawing.result().status_code != 200:
            violations.append(f"the image that was drawn when SIGTERM came: {drawing}")
    print(f"SIGTERM: ended after {time.monotonic() - start:.1f} s")
    return violations


def count_requests(page: dict[tuple[str, str], float]) -> float:
    """The answered requests of clients that count them."""
    return total(page, "requests_total") - sum(total(page, "requests_total", label=label) for label in UNCOUNTED)


def read_metrics(url: str) -> dict[tuple[str, str], float]:
    """Our samples in /metrics, by name and labels."""
    lines = re.findall(r"^ppdiffusers_tome_(\w+)(?:{(.*)})? (\S+)$", httpx.get(f"{url}/metrics").text, re.M)
    return {(name, labels): float(value) for name, labels, value in lines}


def total(page: dict[tuple[str, str], float], *names: str, label: str = "") -> float:
    """The sum of what has one of the names, and the text in its labels."""
    return sum(value for (name, labels), value in page.items() if name in names and label in labels)


def judge(load: Load, memory: list[int], page: dict[tuple[str, str], float], counted: float) -> dict:
    """The result, and under "violations" what must not be."""
    violations = load.wrong[:20] + ([f"and {len(load.wrong) - 20} more"] if len(load.wrong) > 20 else [])
    answered = sum(load.answers.values())
    sent = answered + load.abandoned  # a client that hangs up may be gone before its request is read
    if not answered <= counted <= sent:
        violations.append(f"the server counted {counted:g} requests, the clients {answered} to {sent}")
    if left := total(page, "waiting_pictures", "running_pictures"):
        violations.append(f"{left:g} pictures still wait or are drawn a minute after the last request")
    quarter = len(memory) // 4
    first, last = statistics.median(memory[quarter : 2 * quarter]), statistics.median(memory[-quarter:])
    if last - first > MEMORY_TOLERANCE:
        violations.append(f"memory grew by {(last - first) / MIB:.0f} MiB")
    hung_up = total(page, "requests_total", label='"499"')
    if not hung_up:
        violations.append("the server saw no client hang up: nothing of that was tested")
    violations += [f"{kind}: not one picture" for kind in DRAWING if not load.answers[kind, 200]]
    calls = total(page, "batch_pictures_count") or 1
    return {
        "requests": sent,
        "abandoned": {"by clients": load.abandoned, "status 499 of the server": hung_up},
        "answers": {f"{kind} {status}": count for (kind, status), count in sorted(load.answers.items())},
        "seconds to pictures": {kind: percentiles(load.seconds[kind]) for kind in DRAWING if kind in load.seconds},
        "seconds to other answers": {
            kind: percentiles(load.seconds[kind]) for kind in sorted({*load.seconds} - {*DRAWING})
        },
        "pictures": {what: total(page, "pictures_total", label=what) for what in ("drawn", "abandoned", "failed")},
        "pictures per call": round(total(page, "batch_pictures_sum") / calls, 2),
        "memory, MiB": {
            "second quarter": round(first / MIB),
            "last quarter": round(last / MIB),
            "most": round(max(memory) / MIB),
        },
        "violations": violations,
    }


def percentiles(values: list[float]) -> dict[str, float]:
    """The 50th and the 95th, seconds."""
    ordered = sorted(values)
    return {f"p{percent}": round(ordered[len(ordered) * percent // 100], 3) for percent in (50, 95)}


def report(result: dict) -> None:
    """Print the result."""
    for name, value in result.items():
        if name != "violations":
            print(f"{name}: {value}")
    print("\n".join(f"VIOLATION {one}" for one in result["violations"]) or "no violation")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="exported with --img2img")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--images", type=int, default=3, help="to time alone, at each size and ratio")
    parser.add_argument("--threads", type=int, default=1, help="of the server's predictors")
    parser.add_argument("--output", type=Path, help="write the result, with machine and versions, to this JSON file")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        process, url = start_server(options.model, log, options.threads)
        try:
            result = run(process, url, options)
        finally:
            process.kill()
        _, _, traceback = log.read_text().partition("Traceback")
        if traceback:
            result["violations"].append(f"the server's log holds a traceback: {traceback[:3000]}")
    report(result)
    if options.output:
        command = shlex.join(["python", "benchmarks/load.py", *(sys.argv[1:] if argv is None else argv)])
        options.output.parent.mkdir(parents=True, exist_ok=True)
        whole = {"command": command, "serve": SERVE, **result, "environment": describe_environment()}
        options.output.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    return 1 if result["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
