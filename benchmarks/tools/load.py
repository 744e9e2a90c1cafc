"""Load test of a real server: valid, invalid and abandoned requests, idle connections, and clients that read nothing.

python benchmarks/tools/load.py --model build/load --seconds 300

Before the load, one client measures the time per image at each exported size and ratio. The exit status is 1, with the
reasons, if a request gets no answer or a wrong one, an image does not have the requested size, seed or steps, the
server's counts differ from the clients', its memory grows, its log has a traceback, or SIGTERM does not end it in time
while the pipeline runs and a client reads nothing.

Memory: before the load, each program runs at each batch size, because oneDNN allocates memory for each. The first
quarter of the time does not count. Then the median of the last quarter may exceed that of the second quarter by
MEMORY_TOLERANCE, because the memory that Paddle's and glibc's allocators retain varies by some MiB. A server that kept
one image of 128x128 (48 KiB) per answer would exceed it after 700 answers.
"""

import argparse
import itertools
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
from typing import Any

import httpx
import psutil
from load_clients import DRAWING, OPENAI, UNCOUNTED, Load
from server_process import start_server

from ppdiffusers_tome.comparison.results import make_result, write_result

FORMAT = 2  # of the results
MIB = 2**20
MEMORY_TOLERANCE = 32 * MIB
TIMEOUT = 120.0  # seconds for a request, and from SIGTERM to the end
# 16 clients fill this queue, and a client's body of 1.1 MB is too large.
SERVE = ["--port", "0", "--queue", "12", "--batch", "4", "--max-body", "1000000", "--timeout", f"{TIMEOUT:g}"]
STEPS = 20  # denoising steps of the timed images
OUTCOMES = ("generated", "abandoned", "failed")  # states of images in /metrics


def time_images(url: str, sizes: list[str], ratios: list[float], images: int) -> list[dict[str, Any]]:
    """The median time of an image at each size and ratio, one after the other; then one call of each batch size."""
    rows = []
    with httpx.Client(base_url=url, timeout=600) as http:

        def draw(size: str, ratio: float, steps: int, n: int) -> float:
            body = {"prompt": "a 3d render of fox", "guidance_scale": 2.0, "seed": 1, "steps": steps, "n": n}
            answer = http.post(OPENAI, json={**body, "size": size, "tome_ratio": ratio}).raise_for_status()
            return answer.elapsed.total_seconds()

        for size, ratio in itertools.product(sizes, ratios):
            seconds = statistics.median(draw(size, ratio, STEPS, 1) for _ in range(images))
            row = {"size": size, "ratio": ratio, "seconds_per_image": round(seconds, 3)}
            rows.append({**row, "images_per_hour": round(3600 / seconds)})
        for size, ratio, batch in itertools.product(sizes, ratios, (2, 3, 4)):
            draw(size, ratio, 1, batch)
    return rows


def run(process: subprocess.Popen, url: str, options: argparse.Namespace) -> dict:
    """Run all clients at once, then compare their counts with the server's."""
    model = httpx.get(f"{url}/v1/models").json()["data"][0]
    if not model["image_to_image"]:
        raise SystemExit(f"{options.model} was exported without --img2img")
    images = time_images(url, model["sizes"], model["tome_ratios"], options.images)
    load = Load(url, model["sizes"], model["tome_ratios"])
    before = count_requests(read_metrics(url))
    own = 1  # requests for /metrics from this function; a page does not count itself
    end = time.monotonic() + options.seconds
    clients = [threading.Thread(target=load.client, args=(seed, end)) for seed in range(options.clients)]
    others = (load.idle, load.read_nothing, load.send_garbage)
    clients += [threading.Thread(target=other, args=(end,)) for other in others]
    for client in clients:
        client.start()
    memory = []
    while any(client.is_alive() for client in clients):
        memory.append(psutil.Process(process.pid).memory_info().rss)
        time.sleep(0.5)
    idle_by = time.monotonic() + 60
    while total(page := read_metrics(url), "waiting_images", "running_images") and time.monotonic() < idle_by:
        own += 1
        time.sleep(0.5)
    result = summarise(load, memory, page, count_requests(page) - before - own)
    result["violations"] += end_server(process, load)
    return {"one_client": {"steps": STEPS, "images": images}, **result}


def end_server(process: subprocess.Popen, load: Load) -> list[str]:
    """End the server by SIGTERM while the pipeline runs and a client reads nothing; returns violations."""
    threading.Thread(target=load.read_nothing, args=(time.monotonic() + 2 * TIMEOUT,), daemon=True).start()
    body = {"prompt": "a 3d render of fox", "steps": 50, "size": load.sizes[-1]}
    with ThreadPoolExecutor() as pool:
        drawing = pool.submit(httpx.post, load.url + OPENAI, json=body, timeout=2 * TIMEOUT)
        while not total(read_metrics(load.url), "running_images"):
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
            violations.append(f"the image that was running at SIGTERM: {drawing}")
    print(f"SIGTERM: ended after {time.monotonic() - start:.1f} s")
    return violations


def count_requests(page: dict[tuple[str, str], float]) -> float:
    """The server's count of requests to endpoints whose answers the clients count."""
    return total(page, "requests_total") - sum(total(page, "requests_total", label=label) for label in UNCOUNTED)


def read_metrics(url: str) -> dict[tuple[str, str], float]:
    """The samples of this package in /metrics, by name and labels."""
    lines = re.findall(r"^ppdiffusers_tome_(\w+)(?:{(.*)})? (\S+)$", httpx.get(f"{url}/metrics").text, re.M)
    return {(name, labels): float(value) for name, labels, value in lines}


def total(page: dict[tuple[str, str], float], *names: str, label: str = "") -> float:
    """The sum of the samples with one of the names and the text in their labels."""
    return sum(value for (name, labels), value in page.items() if name in names and label in labels)


def summarise(load: Load, memory: list[int], page: dict[tuple[str, str], float], counted: float) -> dict:
    """The content of the result, with the violations."""
    violations = load.wrong[:20] + ([f"and {len(load.wrong) - 20} more"] if len(load.wrong) > 20 else [])
    answered = sum(load.answers.values())
    sent = answered + load.abandoned  # a client may disconnect before its request is read
    if not answered <= counted <= sent:
        violations.append(f"the server counted {counted:g} requests, the clients {answered} to {sent}")
    if accepted := total(page, "waiting_images", "running_images"):
        violations.append(f"{accepted:g} images still wait or run a minute after the last request")
    quarter = len(memory) // 4
    first, last = statistics.median(memory[quarter : 2 * quarter]), statistics.median(memory[-quarter:])
    if last - first > MEMORY_TOLERANCE:
        violations.append(f"memory grew by {(last - first) / MIB:.0f} MiB")
    disconnected = total(page, "requests_total", label='"499"')
    if not disconnected:
        violations.append("the server counted no disconnected client, so disconnection was not tested")
    violations += [f"{kind}: no image" for kind in DRAWING if not load.answers[kind, 200]]
    calls = total(page, "batch_images_count") or 1
    other_kinds = sorted({*load.seconds} - {*DRAWING})
    return {
        "requests": sent,
        "abandoned": {"by_clients": load.abandoned, "status_499": disconnected},
        "answers": {f"{kind} {status}": count for (kind, status), count in sorted(load.answers.items())},
        "seconds_to_images": {kind: percentiles(load.seconds[kind]) for kind in DRAWING if kind in load.seconds},
        "seconds_to_other_answers": {kind: percentiles(load.seconds[kind]) for kind in other_kinds},
        "images": {outcome: total(page, "images_total", label=outcome) for outcome in OUTCOMES},
        "images_per_call": round(total(page, "batch_images_sum") / calls, 2),
        "memory_mib": {
            "second_quarter": round(first / MIB),
            "last_quarter": round(last / MIB),
            "maximum": round(max(memory) / MIB),
        },
        "violations": violations,
    }


def percentiles(values: list[float]) -> dict[str, float]:
    """The 50th and 95th percentile, in seconds."""
    ordered = sorted(values)
    return {f"p{percent}": round(ordered[len(ordered) * percent // 100], 3) for percent in (50, 95)}


def report(result: dict) -> None:
    """Print the result."""
    for name, value in result.items():
        if name != "violations":
            print(f"{name}: {value}")
    print("\n".join(f"VIOLATION {violation}" for violation in result["violations"]) or "no violation")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder that was exported with --img2img")
    parser.add_argument("--seconds", type=float, default=300, help="of the load (default: 300)")
    parser.add_argument("--clients", type=int, default=16, help="that send requests (default: 16)")
    parser.add_argument("--images", type=int, default=3, help="to time at each size and ratio (default: 3)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the server (default: 1)")
    parser.add_argument("--output", type=Path, help="JSON file for the result")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        serve = ["serve", "--model", str(options.model), "--threads", str(options.threads), *SERVE]
        process, url = start_server([sys.executable, "-m", "ppdiffusers_tome", *serve], log)
        try:
            result = run(process, url, options)
        finally:
            process.kill()
        for traceback in log.read_text().split("Traceback")[1:]:
            result["violations"].append(f"the server's log has a traceback: {traceback[:3000]}")
    report(result)
    if options.output:
        command = shlex.join(["python", "benchmarks/tools/load.py", *(sys.argv[1:] if argv is None else argv)])
        write_result(options.output, make_result("load", FORMAT, command, serve=SERVE, **result))
    return 1 if result["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
