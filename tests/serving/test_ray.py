"""On Ray, engines and nodes that die lose no request and no prompt. Only `make test-ray` runs it; it takes minutes."""

import argparse
import gc
import ipaddress
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from time import monotonic

import httpx
import psutil
import pytest
from PIL import Image
from serving_support import MALFORMED_HOSTS, OPENAI, until

from ppdiffusers_tome import ToMeConfigError
from ppdiffusers_tome.commands import image_options
from ppdiffusers_tome.run.manifest import Size
from ppdiffusers_tome.serving.app_config import KEY_VARIABLE
from ppdiffusers_tome.serving.jobs import AbandonedError, Job
from ppdiffusers_tome.serving.prompt_file import Prompt

pytest.importorskip("ray", reason="'make test-ray' installs it")
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # Ray's warnings

from ray.cluster_utils import Cluster as Nodes  # noqa: E402

from ppdiffusers_tome.serving import ray_engines  # noqa: E402

PYTHON_M = (sys.executable, "-W", "ignore", "-m", "ppdiffusers_tome")


# A server with two engines, in its own processes


class Server:
    def __init__(self, process, port, log):
        self.process, self.log = process, log
        headers = {"Authorization": "Bearer secret"}
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=240)

    def generate(self, **body):
        return self.http.post(OPENAI, json={"prompt": "fox", "steps": 3, **body})

    def start_of_stream(self, **body):
        """The first 3 seconds of a stream, after which the client disconnects."""
        end, lines = monotonic() + 3, []
        with self.http.stream("POST", OPENAI, json={"prompt": "fox", **body}) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                if monotonic() > end:
                    break
        return "".join(lines)

    def named(self, name):
        """Ray's processes whose title contains the name, by process id."""
        return {child.pid: child for child in with_children(self.process) if name in title(child)}

    def count(self, name, **labels):
        text = ",".join(f'{key}="{value}"' for key, value in labels.items())
        pattern = rf"^ppdiffusers_tome_{name}{re.escape('{' + text + '}') if labels else ''} (\S+)$"
        return float(re.search(pattern, self.http.get("/metrics").text, re.M)[1])

    def accepted(self):
        return self.count("waiting_images") + self.count("running_images")

    def wait_for_engines(self, replaced=()):
        until(lambda: len(set(self.named("EngineProcess")) - set(replaced)) == 2, seconds=120)


def with_children(process):
    return [process, *process.children(recursive=True)]


def title(process):
    """The command line, which Ray replaces by a description of the process; empty if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def wait_for(find):
    """The first of what `find` lists, as soon as there is one: between two batches no process generates."""
    listed = []
    until(lambda: listed.extend(find()) or listed)
    return listed[0]


@contextmanager
def send_all(server, bodies):
    """Send all requests at once; yields the list of answers, complete when the context ends."""
    answers = [None] * len(bodies)

    def ask(place):
        answers[place] = server.generate(**bodies[place])

    with ThreadPoolExecutor(len(bodies)) as pool:
        pending = [pool.submit(ask, place) for place in range(len(bodies))]
        yield answers
    for one in pending:
        one.result()


def data(answer):
    assert answer.status_code == 200, answer.text
    return [image["b64_json"] for image in answer.json()["data"]]


@contextmanager
def serving_on_ray(folder, log, *options):
    """`serve --ray` with two engines of two images a batch."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--replicas", "2", "--batch", "2", "--queue", "12", "--max-steps", "1000", "--timeout", "240", *options]
    command = [*PYTHON_M, "serve", "--ray", "--model", str(folder), "--port", str(port), *options]
    with log.open("w") as file:
        process = psutil.Popen(command, stdout=file, stderr=file, env={**os.environ, KEY_VARIABLE: "secret"})
    running = Server(process, port, log)
    try:
        until(lambda: "listening at" in log.read_text() or process.poll() is not None, seconds=300)
        until(lambda: process.poll() is not None or running.http.get("/ready").status_code == 200, seconds=300)
        assert process.poll() is None, log.read_text()
        yield running
    finally:
        running.http.close()
        children = process.children(recursive=True) if process.is_running() else []
        for child in [*children, process]:
            if child.is_running():
                child.kill()
        process.wait()


@pytest.fixture(scope="module")
def server(exported_folder, tmp_path_factory):
    with serving_on_ray(exported_folder, tmp_path_factory.mktemp("ray") / "log", "--replica-cpus", "0.5") as running:
        yield running


def test_app_is_the_same_as_in_one_process(server):
    assert server.http.get("/ready").json() == {"state": "ready"}
    assert httpx.get(f"{server.http.base_url}/v1/models").status_code == 401
    refused = server.generate(size="64x64")
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, "size")
    assert httpx.get(f"{server.http.base_url}/").headers["content-type"].startswith("text/html"), "without a key"
    for host in MALFORMED_HOSTS:
        headers = {"Host": host.encode("latin-1")}
        assert httpx.get(f"{server.http.base_url}/v1/models", headers=headers).status_code == 401
    first, second = data(server.generate(seed=5, n=2))
    *_, completed, end = server.generate(seed=5, stream=True).text.split("\n\n")
    streamed = json.loads(completed.partition("data: ")[2])
    assert (streamed["b64_json"], streamed["batch"], end) == (first, 1, "") and streamed["seconds"] > 0
    steps = re.findall(r'"step":(\d+),"steps":900}', server.start_of_stream(seed=5, stream=True, steps=900))
    assert len(set(steps)) >= 2, "the engine's steps are reported"
    assert first != second and data(server.generate(seed=5)) == [first] and data(server.generate(seed=6)) == [second]


def test_ray_listens_on_this_machine_only(server):
    listening = [
        connection.laddr
        for child in server.process.children(recursive=True)
        for connection in child.connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    own = ipaddress.ip_network("127.0.0.0/8")
    addresses = [ipaddress.ip_address(address.ip.removeprefix("::ffff:")) for address in listening]
    assert addresses and not [address for address in addresses if address not in own]


def test_killed_engine_is_replaced_and_no_image_lost(server):
    alone = data(server.generate(seed=3, steps=60))
    server.wait_for_engines()
    before = server.named("EngineProcess")
    with send_all(server, [{"seed": seed, "steps": 60} for seed in range(12)]) as answers:
        until(lambda: any(answers), seconds=120)  # both have work
        victim = next(iter(before))
        os.kill(victim, signal.SIGKILL)
    assert [answer.status_code for answer in answers] == [200] * 12
    assert len({data(answer)[0] for answer in answers}) == 12
    assert data(server.generate(seed=3, steps=60)) == alone
    assert "an engine was lost and is replaced" in server.log.read_text()
    server.wait_for_engines(replaced=[victim])
    assert server.accepted() == 0


def test_tokens_are_counted_after_all_engines_have_died(server):
    """No request for an image has noticed it before."""
    server.wait_for_engines()
    before = server.named("EngineProcess")
    for victim in before:
        os.kill(victim, signal.SIGKILL)
    statuses = []

    def count():
        statuses.append(server.http.post("/v1/tokens", json={"prompt": "fox"}).status_code)
        return statuses[-1] == 200

    until(count, seconds=120)
    assert set(statuses) <= {200, 503}
    server.wait_for_engines(replaced=before)


def test_every_request_is_answered_with_a_full_queue(server):
    server.wait_for_engines()
    with send_all(server, [{"seed": seed, "steps": 60} for seed in range(24)]) as answers:
        pass
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 429} and statuses.count(200) >= 12
    assert {answer.headers["Retry-After"] for answer in answers if answer.status_code == 429} == {"5"}


@pytest.mark.parametrize("stream", [False, True])
def test_disconnection_frees_the_place(server, stream):
    before = server.count("images_total", outcome="abandoned")
    body = {"prompt": "fox", "steps": 900, "n": 4, "stream": stream}
    if stream:
        with server.http.stream("POST", OPENAI, json=body) as answer:
            next(answer.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            server.http.post(OPENAI, json=body, timeout=1)
    until(lambda: server.count("images_total", outcome="abandoned") == before + 4)
    until(lambda: server.http.get("/sdapi/v1/progress").json()["state"]["job_count"] == 0)  # of 900 steps
    data(server.generate())


def test_sigterm_finishes_accepted_requests_and_ends_all_processes(server):
    server.wait_for_engines()
    children = server.process.children(recursive=True)
    with send_all(server, [{"seed": seed, "steps": 60} for seed in range(6)]) as answers:
        until(lambda: server.accepted() == 6)
        server.process.send_signal(signal.SIGTERM)
        late = httpx.Response(0)
        while late.status_code != 503:  # until the signal has arrived
            late = server.generate(steps=1)
    assert late.headers["Retry-After"] == "5"
    assert [answer.status_code for answer in answers] == [200] * 6
    assert server.process.wait(120) == 0, server.log.read_text()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive


def test_a_model_that_cannot_be_loaded_ends_the_command(exported_folder, tmp_path):
    folder = shutil.copytree(exported_folder, tmp_path / "damaged")
    weights = next(folder.rglob("*.pdiparams"))
    weights.write_bytes(bytes(weights.stat().st_size))
    options = ["--ray", "--min-replicas", "1", "--max-replicas", "2", "--model", str(folder), "--port", "0"]
    done = subprocess.run([*PYTHON_M, "serve", *options], capture_output=True, text=True, timeout=240)
    assert done.returncode == 2 and "differs from the exported file" in done.stderr


# Offline

ANIMALS = ("fox", "owl", "cat", "dog", "bee", "ant", "cow", "hen")


def generate_on_ray_and_here(folder, tmp_path, kill, *options):
    """Eight prompts on Ray, with a call of `kill` after the first images, give the same bytes as in one process."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"a 3d render of {animal}\n" for animal in ANIMALS))
    settings = ["--steps", "50", "--batch", "2", "--threads", "1", "--output"]
    command = [*PYTHON_M, "generate", "--prompts", str(prompts), "--model", str(folder), *settings]
    process = psutil.Popen([*command, str(tmp_path / "ray"), "--ray", *options], stdout=subprocess.PIPE, text=True)
    try:
        until(lambda: len(list((tmp_path / "ray").glob("0*.png"))) >= 2 or process.poll() is not None, seconds=200)
        kill(process)
        printed, _ = process.communicate(timeout=200)
    finally:
        if process.poll() is None:
            process.kill()
    assert process.returncode == 0 and "8 made, 0 skipped (already there), 0 failed of 8" in printed
    subprocess.run([*command, str(tmp_path / "here")], check=True)
    here, there = ({path.name: path.read_bytes() for path in (tmp_path / d).glob("*.png")} for d in ("here", "ray"))
    assert here == there and len(here) == 8


def test_killed_actor_is_replaced_and_no_prompt_lost(tmp_path, exported_folder):
    def kill(process):
        wait_for(lambda: [p for p in with_children(process) if "EngineProcess.generate" in title(p)]).kill()

    generate_on_ray_and_here(exported_folder, tmp_path, kill)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--ray-address", "head:6379"], 1),
        (["--ray-address", "head:6379", "--threads", "3"], 3),
        (["--actors", "1000"], 1),
        (["--threads", "0"], "--threads 0 is not allowed: it must be 1 or more"),
        (["--actors", "0"], "--actors 0 is not allowed: it must be 1 or more"),
    ],
)
def test_threads_of_an_actor(options, expected):
    parser = argparse.ArgumentParser()
    image_options.add_worker_options(parser)
    parsed = parser.parse_args(["--ray", *options])
    if isinstance(expected, int):
        assert image_options.threads_per_process(parsed) == expected
    else:
        with pytest.raises(ToMeConfigError, match=expected):
            image_options.threads_per_process(parsed)


# Several nodes on one machine, each with its own raylet, workers and object store

NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
QUICK = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_timeout_ms": 1000}


def node_of_a_command(address):
    """The node that a new process connects to."""
    code = f"import zlib, ray; ray.init({address!r}); print(ray.get_runtime_context().get_node_id())"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    return done.stdout.splitlines()[-1]


@pytest.fixture
def nodes():
    """Three nodes: a head without room for engines, and two with room for one engine each.

    Of nodes with one address Ray connects a command to any, the same one each time. Ours is to run on the head, as
    serve-ops.md asks: nodes on which it would not are made again.
    """
    while True:
        head = {**NODE, "num_cpus": 0, "include_dashboard": False, "_system_config": QUICK}
        nodes = Nodes(True, head_node_args=head)
        try:
            for _ in range(2):
                nodes.add_node(**NODE)
            if node_of_a_command(nodes.address) == nodes.head_node.node_id:
                yield nodes
                return
        finally:
            nodes.shutdown()
            nodes = None
            gc.collect()  # files that Ray leaves open, while its warnings are ignored


def processes_of(node):
    return with_children(psutil.Process(node.all_processes["raylet"][0].process.pid))


def runs(node, name):
    return any(name in title(process) for process in processes_of(node))


def test_lost_node_loses_no_request(nodes, exported_folder, tmp_path):
    first, second = nodes.worker_nodes
    with serving_on_ray(exported_folder, tmp_path / "log", "--ray-address", nodes.address) as server:
        until(lambda: runs(first, "EngineProcess") and runs(second, "EngineProcess"), seconds=120)
        bodies = [{"seed": seed, "steps": 60} for seed in range(12)]
        with send_all(server, bodies) as answers:
            until(lambda: any(answers), seconds=120)  # both engines have work
            nodes.remove_node(first, allow_graceful=False)  # with no room for another engine
        made = [data(answer) for answer in answers]
        third = nodes.add_node(**NODE)
        until(lambda: runs(third, "EngineProcess"), seconds=60)
        with send_all(server, bodies) as answers:
            until(lambda: any(answers), seconds=120)
            frozen = processes_of(second)  # like a network failure: its connections stay open
            for process in frozen:
                process.suspend()
        assert [data(answer) for answer in answers] == made
        for process in frozen:
            process.kill()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(120) == 0, server.log.read_text()


def test_lost_node_loses_no_prompt(nodes, exported_folder, tmp_path):
    def kill(process):
        node = wait_for(lambda: [node for node in nodes.worker_nodes if runs(node, "EngineProcess.generate")])
        nodes.remove_node(node, allow_graceful=False)

    generate_on_ray_and_here(exported_folder, tmp_path, kill, "--ray-address", nodes.address)


POISON = """
import os, json, sys, time
from PIL import Image
from ppdiffusers_tome.run.manifest import Size
from ppdiffusers_tome.serving.jobs import AbandonedError, EngineLostError, GenerationError, Job
from ppdiffusers_tome.serving.prompt_file import Prompt
from ppdiffusers_tome.serving.ray_engines import RayError, RemoteEngine, generate_on_ray, ray_session

class Engine:
    name, sampler, methods, can_batch, program_loads = "model", "DDIM", {}, True, 1
    def load_next(self):
        return False
    def count_tokens(self, prompt):
        return 3, 77, ""
    def generate(self, jobs, should_stop=None):
        if any("die" in job.prompt for job in jobs):
            os._exit(1)
        if any("hang" in job.prompt for job in jobs):
            time.sleep(1000)
        if any("stop" in job.prompt for job in jobs):
            while not should_stop(7, 9):
                time.sleep(0.01)
            raise AbandonedError("stopped")
        if any("black" in job.prompt for job in jobs):
            raise GenerationError("not finite")
        return [Image.new("RGB", (8, 8)) for job in jobs]

def load():
    raise OSError("no such model")

def crash(log=sys.argv[1]):
    with open(log, "a") as file:
        file.write("x")
    os._exit(1)

prompts = [Prompt(i, Job(text, Size(8, 8), 0.5, seed=i)) for i, text in enumerate(["a", "die", "black"])]
with ray_session(None, 1, 0, shows_logs=False):
    made = {p.index: d if isinstance(d, str) else "png"
             for p, d in generate_on_ray(Engine, 1)([prompts[:1], prompts[1:2], prompts[2:]])}
    for broken in (load, crash):
        try:
            list(generate_on_ray(broken, 1)([prompts[:1]]))
        except RayError as error:
            made[broken.__name__] = str(error)
    outcomes = {}
    for text in ("die", "hang", "black", "stop", "a"):
        engine = RemoteEngine(Engine, 1, 0, hung_seconds=3)
        steps = []
        def should_stop(step, count):
            steps.append(step)
            return (step, count) == (7, 9)
        try:
            outcomes[text] = len(engine.generate([Job(text, Size(8, 8), 0.5, seed=0)], should_stop))
        except (AbandonedError, EngineLostError, GenerationError) as error:
            outcomes[text] = type(error).__name__
        if text == "stop":  # the next call is not stopped
            again = engine.generate([Job("a", Size(8, 8), 0.5, seed=0)], lambda step, steps: False)
            outcomes["after stop"] = len(again)
        try:
            outcomes["tokens after " + text] = engine.count_tokens("a")[0]
        except EngineLostError as error:
            outcomes["tokens after " + text] = type(error).__name__
        del engine
    for broken in (load, crash):
        try:
            RemoteEngine(broken, 1, 0, 3)
        except (RayError, OSError) as error:
            outcomes[broken.__name__] = str(error)
    try:
        RemoteEngine(lambda: time.sleep(1000), 1, 0, 3, should_stop=lambda: True)
    except AbandonedError as error:
        outcomes["close while loading"] = str(error)
    closing = []
    engine = RemoteEngine(Engine, 1, 0, 1000, should_stop=lambda: bool(closing))
    closing.append(True)
    try:
        engine.generate([Job("hang", Size(8, 8), 0.5, seed=0)])
    except AbandonedError as error:
        outcomes["close while running"] = str(error)
print("RESULT", json.dumps([made, outcomes]))
"""


def test_engines_that_die_hang_or_do_not_load(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", POISON, str(tmp_path / "log")]
    done = subprocess.run(command, capture_output=True, text=True)
    made, outcomes = json.loads(done.stdout.partition("RESULT ")[2])
    load, crash = made.pop("load"), made.pop("crash")
    assert made == {"0": "png", "1": "3 engines died with this prompt", "2": "GenerationError: not finite"}
    assert load == "no engine could be loaded: no such model"
    assert crash.startswith("no engine could be loaded: 3 processes ended while they loaded the model: ")
    assert (tmp_path / "log").read_text() == "xxxxxx"
    assert outcomes.pop("crash").startswith("3 processes ended while they loaded the model: ")
    assert "no such model" in outcomes.pop("load")
    assert outcomes == {
        "die": "EngineLostError",
        "hang": "EngineLostError",
        "black": "GenerationError",
        "stop": "AbandonedError",
        "after stop": 1,
        "a": 1,
        "tokens after die": "EngineLostError",
        "tokens after hang": "EngineLostError",
        "tokens after black": 3,
        "tokens after stop": 3,
        "tokens after a": 3,
        "close while loading": "the engine was stopped",
        "close while running": "the engine was stopped",
    }


class FakeRemoteEngine:
    """In this process. What it generates depends on the prompt, and it counts its calls."""

    name, sampler, methods, can_batch, program_loads = "model", "DDIM", {}, True, 0
    calls = 0

    def __init__(self, load, cpus, gpus, hung_seconds, should_stop):
        self.should_stop = should_stop

    def generate(self, jobs, should_stop=None):
        FakeRemoteEngine.calls += 1
        prompt = jobs[0].prompt
        if prompt == "exit":
            raise SystemExit
        if prompt == "wait":
            until(self.should_stop)
            raise AbandonedError("stopped")
        image = None if prompt == "broken" else Image.new("RGB", (8, 8))
        return [image for _ in jobs]


@pytest.fixture
def fake_engines(monkeypatch):
    monkeypatch.setattr(ray_engines, "RemoteEngine", FakeRemoteEngine)
    monkeypatch.setattr(FakeRemoteEngine, "calls", 0)


def batches_of(*prompts):
    return [[Prompt(index, Job(prompt, Size(8, 8), 0.5, seed=index))] for index, prompt in enumerate(prompts)]


@pytest.mark.parametrize("prompt", ["broken", "exit"])
@pytest.mark.parametrize("engines", [1, 2])
def test_whatever_a_batch_raises_reaches_the_consumer(fake_engines, prompt, engines):
    """Also what is no failure of its pipeline call: an image that cannot be encoded, for instance."""
    run = ray_engines.generate_on_ray(None, engines)
    with ThreadPoolExecutor(1) as pool:
        consumer = pool.submit(list, run(batches_of("fox", prompt, "owl")))
        assert isinstance(consumer.exception(timeout=20), SystemExit if prompt == "exit" else AttributeError)


def test_workers_end_when_the_consumer_stops(fake_engines):
    """Also those that run a batch. None uses Ray after its session, which would start another Ray."""
    before = threading.active_count()
    results = ray_engines.generate_on_ray(None, 2)(batches_of("fox", *["wait"] * 10))
    assert next(results)[0].index == 0
    results.close()
    assert threading.active_count() == before and FakeRemoteEngine.calls <= 3
