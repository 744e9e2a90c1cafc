"""Check a real server against its own /openapi.json, with all checks of schemathesis.

build/fuzz-venv/bin/python benchmarks/tools/fuzz_http.py --model build/load --server-python .venv/bin/python

The first run is against the server of `--model`, with a few bodies per endpoint; the second one, with thousands,
against the same HTTP application with an engine that returns blank images at once (fuzz_blank_server.py). Both servers
have an API key and get malformed Host headers on every path, with the key and without.

The exit status is 1 if a malformed Host gets another answer than 400 or that of an ordinary one, an answer does not
match the schema (status, body, headers), an allowed request is refused, a forbidden one is accepted, or the server's
log has a traceback.

This file is also the module of hooks that schemathesis loads. JSON Schema cannot express that a string is an image, or
that two fields contradict each other, so a hook sets such fields in bodies that must be accepted.
"""

import argparse
import base64
import os
import signal
import subprocess
import sys
import tempfile
from functools import partial
from itertools import product
from pathlib import Path
from random import Random

import requests
import schemathesis
from schemathesis.generation import GenerationMode
from server_process import start_server

KEY = "fuzz"
HOSTS = ["x/health?", "x/ready?", "x/page/?", "x/page/#", "/health", "?", "#", "[", "]", "[evil]", "a]b", "a@b", "a b"]
DELIMITERS = '/?#[]@ \\"%<>'  # none can be in a Host that is not malformed
# A gray image of 2x2 pixels
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAAAAABX3VL4AAAADklEQVR4nGNoaGBoaAAABgYCASzBUNcAAAAASUVORK5CYII="
# All other checks run by default. /sdapi takes a number in a string, which its schema does not say, and in a form all
# values are texts.
CONFIG = """
[[operations]]
include-path-regex = "^/(sdapi/|v1/images/edits)"
checks.negative_data_rejection.enabled = false
"""
# HTTP is tested, not the pipeline: one size, few steps, and a queue that is never full.
SERVE = ["--port", "0", "--size", "64", "--max-steps", "2", "--steps", "1", "--max-images", "2", "--queue", "1000"]


@schemathesis.hook
def before_call(context, case, kwargs):
    """Make a body that the schema allows a valid request."""
    body = case.body
    if case.meta is None or case.meta.generation.mode != GenerationMode.POSITIVE or not isinstance(body, dict):
        return
    if "init_images" in body:
        body["init_images"] = [PNG]
    if case.path == "/v1/images/edits":
        body["image"] = base64.b64decode(PNG)
    elif body.get("image") is not None:
        body["image"] = PNG
    else:
        body.pop("strength", None)
    if (body.get("n_iter") or 1) * (body.get("batch_size") or 1) > 2:
        body["n_iter"] = 1
    if body.get("enable_hr"):  # the only exported size, and nothing of what a second pass does not support
        body |= {"hr_scale": 1, "hr_resize_x": 0, "hr_resize_y": 0, "hr_second_pass_steps": 0, "denoising_strength": 1}
        body |= dict.fromkeys(("hr_upscaler", "hr_prompt", "hr_negative_prompt"), "")
        body |= dict.fromkeys(("hr_checkpoint_name", "hr_sampler_name", "hr_scheduler", "firstpass_image"), "")
    for image, strength in (("init_images", "denoising_strength"), ("image", "strength")):
        share = 0.75 if body.get(strength) is None else body[strength]
        if body.get(image) and int(share * (body.get("steps") or 1)) < 1:
            body[strength] = 1.0


def check_hosts(url: str, seed: str) -> list[str]:
    """Findings about malformed Host headers: none may change an answer, with the key or without, except to 400."""
    session, random, findings = requests.Session(), Random(seed), []
    key = {"Authorization": f"Bearer {KEY}"}
    paths = session.get(f"{url}/openapi.json", headers=key, timeout=60).json()["paths"]
    assert "/v1/images/generations" in paths and "/metrics" in paths, paths
    for path, methods in {**paths, "/": {"get": {}}, "/page/page.js": {"get": {}}, "/nosuch": {"post": {}}}.items():
        texts = ["".join(random.choices(f"ax1.-:{DELIMITERS}", k=random.randint(0, 9))) for _ in range(20)]
        hosts = [*HOSTS, *(f"x{random.choice(DELIMITERS)}{text}x" for text in texts)]
        for method, sent in product({**methods, "get": {}, "options": {}}, ({}, key)):
            send = partial(session.request, method, url + path, json={}, timeout=60)
            usual = send(headers=sent).status_code
            # Browsers ask by OPTIONS without it.
            needs_key = method != "options" and path not in ("/", "/page/page.js", "/health", "/ready")
            if needs_key and not sent and usual != 401:
                findings.append(f"{method} {path} without the key is answered with {usual}")
            for host in hosts:
                status = send(headers={"Host": host, **sent}).status_code
                if status not in (400, usual):
                    findings.append(f"{method} {path} with Host {host!r} is answered with {status}, not {usual}")
    return findings


def check(command: list[str], seed: str, *flags: str) -> list[str]:
    """Findings about the server that the command starts."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        Path(folder, "schemathesis.toml").write_text(CONFIG)
        server, url = start_server(command, log, PPDIFFUSERS_TOME_API_KEY=KEY)
        try:
            schema = [f"{url}/openapi.json", "-H", f"Authorization: Bearer {KEY}"]
            output = ["--continue-on-failure", "--generation-database", "none", "--no-color"]
            run = [str(Path(sys.executable).parent / "schemathesis"), "run", *schema, *output, "--seed", seed, *flags]
            environment = {**os.environ, "SCHEMATHESIS_HOOKS": "fuzz_http", "PYTHONPATH": str(Path(__file__).parent)}
            findings = check_hosts(url, seed)
            status = subprocess.run(run, env=environment, cwd=folder).returncode
            ready = requests.get(f"{url}/ready", timeout=60)
        finally:
            server.send_signal(signal.SIGTERM)
            ended = server.wait(60)
        if status:
            findings.append(f"schemathesis: exit status {status}")
        if ready.status_code != 200:
            findings.append(f"/ready answers {ready.status_code} afterwards: {ready.text}")
        if ended:
            findings.append(f"SIGTERM: exit status {ended}")
        if "Traceback" in log.read_text():
            findings.append("the log has a traceback:\n" + log.read_text()[-5000:])
        return findings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder that was exported with --size 64 and --img2img")
    parser.add_argument("--server-python", default=sys.executable, help="interpreter with ppdiffusers_tome")
    parser.add_argument("--examples", default="25", help="most bodies per endpoint and phase")
    parser.add_argument("--seed", default="1")
    options = parser.parse_args()
    real = [options.server_python, "-m", "ppdiffusers_tome", "serve", "--model", options.model, *SERVE]
    blank = [options.server_python, str(Path(__file__).with_name("fuzz_blank_server.py"))]
    findings = check(real, options.seed, "--phases", "fuzzing", "--max-examples", "4")
    findings += check(blank, options.seed, "--max-examples", options.examples)
    print("\n".join(findings) or "no finding")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
