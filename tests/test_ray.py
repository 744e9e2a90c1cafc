"""Serving and generation on Ray, also with engines that are killed. Only `make test-ray` runs it; it takes minutes."""

import argparse
import asyncio
import ipaddress
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace
from time import monotonic

import httpx
import psutil
import pytest
from conftest import tiny_pipeline
from serving_support import MALFORMED_HOSTS, OPENAI, FakeEngine, assert_refused_whatever_the_host, until
from starlette.testclient import TestClient

from ppdiffusers_tome import ToMeConfigError
from ppdiffusers_tome.commands import image_options
from ppdiffusers_tome.generation.jobs import GenerationError, Job, JobError, Limits
from ppdiffusers_tome.inference.manifest import Size
from ppdiffusers_tome.serving.app import create_app
from ppdiffusers_tome.serving.app_config import KEY_VARIABLE, AppConfig
from ppdiffusers_tome.serving.prometheus import Metrics
from ppdiffusers_tome.serving.queue import FAILURES
from ppdiffusers_tome.serving.service import Progress, RequestProgress
from ppdiffusers_tome.serving.service_errors import DrainingError, JobFailedError, NotReadyError, QueueFullError

pytest.importorskip("ray", reason="'make test-ray' installs it")
pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore"),
]  # Ray's warnings

from ray import cloudpickle  # noqa: E402
from ray.cluster_utils import Cluster as Nodes  # noqa: E402
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError  # noqa: E402
from ray.serve.exceptions import DeploymentUnavailableError  # noqa: E402

from ppdiffusers_tome.serving import cluster  # noqa: E402
from ppdiffusers_tome.serving.cluster import ATTEMPTS, Cluster, ClusterService, EngineReplica  # noqa: E402

LIMITS = Limits(sizes=(Size(32, 32),), ratios=(0.5,))
JOB = Job("fox", 32, 32, 0.5, seed=0)
PYTHON_M = (sys.executable, "-W", "ignore", "-m", "ppdiffusers_tome")
LOST = (ActorDiedError(), ActorUnavailableError("gone", b"0" * 16))


# The service of the app, with fake engines


class Answers:
    """A fake of Ray's handle with two engines: each call returns or raises the next of `answers`.

    A number is a job that takes as many seconds.
    """

    def __init__(self, *answers):
        self.answers, self.calls, self.cancelled = list(answers), 0, 0
        self.engines = asyncio.Semaphore(2)

    @property
    def generate(self):
        return self

    def remote(self, job):
        self.calls += 1
        return _Answer(self, self.answers.pop(0))


class _Answer:
    def __init__(self, answers, answer):
        self.answers, self.answer = answers, answer

    def __await__(self):
        if isinstance(self.answer, float):
            yield from self._work().__await__()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer, RequestProgress(seconds=2.5, batch=4)

    async def _work(self):
        async with self.answers.engines:
            await asyncio.sleep(self.answer)

    def cancel(self):
        self.answers.cancelled += 1


@pytest.fixture
def service(monkeypatch):
    monkeypatch.setattr(cluster.serve, "get_deployment_handle", lambda *names: None)

    def make(*answers, **options):
        made = ClusterService("model", "DDIM", {}, LIMITS, Metrics(), Cluster(**{**TWO_AT_ONCE, **options}))
        made._engines = Answers(*answers)
        return made

    return make


TWO_AT_ONCE = {"capacity": 1, "largest_batch": 1, "request_seconds": 60}  # three accepted, of which one runs
NEVER = 3600.0


def images(service, outcome):
    return service.metrics.registry.get_sample_value("ppdiffusers_tome_images_total", {"outcome": outcome})


def test_job_of_a_dead_engine_goes_to_another(service):
    made = service(*LOST, "image")
    assert asyncio.run(made.submit([JOB])) == ["image"]
    assert (made._engines.calls, images(made, "drawn"), images(made, "failed")) == (3, 1, 0)


def test_job_that_kills_engines_fails(service):
    made = service(*[LOST[0]] * ATTEMPTS, "not used")
    with pytest.raises(GenerationError, match="3 engines died"):
        asyncio.run(made.submit([JOB]))
    assert (made._engines.calls, images(made, "failed")) == (ATTEMPTS, 1)


@pytest.mark.parametrize(
    "error", [JobFailedError("not finite"), JobError("steps", "none"), NotReadyError("failed", retry_after=7)]
)
def test_error_of_an_engine_is_raised_unchanged_and_not_retried(service, error):
    sent = cloudpickle.loads(cloudpickle.dumps(RayTaskError("generate", "a traceback", error)))
    made = service(sent.as_instanceof_cause(), "not used")
    with pytest.raises(type(error)) as raised:
        asyncio.run(made.submit([JOB]))
    assert (type(raised.value), str(raised.value)) == (type(error), str(error))
    assert vars(raised.value) == vars(error)
    assert (made._engines.calls, images(made, "failed")) == (1, 1)


def test_accepted_images_are_limited(service):
    async def ask(made):
        drawing = asyncio.ensure_future(made.submit([JOB]))
        await asyncio.sleep(0.01)
        with pytest.raises(QueueFullError, match="1 of at most 3 images are accepted"):
            await made.submit([JOB] * 3)
        assert await made.submit([JOB] * 2) == ["a", "b"]
        drawing.cancel()
        await asyncio.wait([drawing])
        assert await made.submit([JOB] * 3) == ["c", "d", "e"]

    made = service(NEVER, *"abcde")
    asyncio.run(ask(made))
    assert made._engines.calls == 6


def test_retry_after_estimates_when_all_accepted_images_are_done(service):
    async def ask(made):
        await made.submit([JOB] * 8)
        start = monotonic()
        drawing = asyncio.ensure_future(made.submit([JOB] * 20))
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError) as refused:
            await made.submit([JOB])
        await drawing
        return refused.value.retry_after, monotonic() - start

    made = service(*[0.4] * 28, min_replicas=2, max_replicas=2, capacity=16)
    promised, took = asyncio.run(ask(made))
    assert 0.7 * took <= promised <= 1.5 * took, (promised, took)


def test_progress_of_accepted_images(service):
    async def ask(made):
        assert made.progress() == Progress()
        drawing = asyncio.ensure_future(made.submit([JOB] * 2))
        await asyncio.sleep(0.2)
        progress = made.progress()
        drawing.cancel()
        await asyncio.wait([drawing])
        assert made.progress() == Progress()
        return progress

    progress = asyncio.run(ask(service(NEVER, NEVER)))
    assert (progress.running, progress.waiting, progress.step, progress.steps) == (1, 1, 0, 0)
    assert 0.2 <= progress.seconds < 10


def test_progress_of_a_request(service):
    """Its place among the images that no engine has yet, and the seconds that its engine measured; no steps."""

    async def ask(made):
        first, second = RequestProgress(), RequestProgress()
        drawing = [asyncio.ensure_future(made.submit([JOB], progress=one)) for one in (first, second)]
        await asyncio.sleep(0.01)
        assert (first.position, second.position, second.steps) == (0, 1, 0)
        drawing[0].cancel()
        await asyncio.wait(drawing[:1])
        assert second.position == 0
        assert await drawing[1]
        return second.seconds, second.batch

    assert asyncio.run(ask(service(NEVER, 0.1))) == (2.5, 4)


def test_no_host_header_gets_around_the_key_of_the_app(service):
    made = service()
    app = create_app(made, AppConfig(api_key="secret"), made.metrics)
    assert_refused_whatever_the_host(app, TestClient(app))


def test_timeouts_and_failures_in_a_row_are_trouble(service):
    async def ask(made, seconds):
        """Cancel a request after `seconds`, as at the time limit; returns the trouble just before."""
        drawing = asyncio.ensure_future(made.submit([JOB]))
        await asyncio.sleep(seconds)
        trouble = made.trouble
        drawing.cancel()
        await asyncio.wait([drawing])
        assert made.trouble is None, "without accepted images the next request may succeed"
        return trouble

    async def ask_all(made):
        for _ in range(FAILURES):
            assert await ask(made, 0.01) is None
            assert await ask(made, 0.2) is None
        trouble = await ask(made, 0.01)
        await made.submit([JOB])
        return trouble, await ask(made, 0.01)

    never = [NEVER] * 2 * FAILURES
    late = asyncio.run(ask_all(service(*never, NEVER, "image", NEVER, request_seconds=0.2)))
    assert late == (f"the last {FAILURES} images failed or reached the time limit", None)
    made = service(*[JobFailedError("of this job")] * FAILURES, *[JobError("steps", "none")] * FAILURES, NEVER)
    for _ in range(2 * FAILURES):
        with pytest.raises((JobFailedError, JobError)):
            asyncio.run(made.submit([JOB]))
    assert asyncio.run(ask(made, 0.01)) is None, "the requests caused them"
    made = service(*[GenerationError("not finite")] * FAILURES, NEVER)
    for _ in range(FAILURES):
        with pytest.raises(GenerationError):
            asyncio.run(made.submit([JOB]))
    assert asyncio.run(ask(made, 0.01)) == late[0]


def test_draining_finishes_accepted_jobs_and_refuses_others(service):
    async def ask(made):
        drawing = asyncio.ensure_future(made.submit([JOB]))
        await asyncio.sleep(0)
        draining = asyncio.ensure_future(made.drain())
        await asyncio.sleep(0.05)
        with pytest.raises(DrainingError):
            await made.submit([JOB])
        assert made.state == "draining" and not draining.done()
        await draining
        assert drawing.done()

    asyncio.run(ask(service(0.3)))


def test_without_engines_the_service_is_not_ready(service):
    with pytest.raises(NotReadyError, match="no engine could be started"):
        asyncio.run(service(DeploymentUnavailableError("engines")).submit([JOB]))


def test_cancelled_or_partly_failed_request_is_abandoned(service):
    async def cancel(made):
        drawing = asyncio.ensure_future(made.submit([JOB, JOB]))
        await asyncio.sleep(0.01)
        drawing.cancel()
        await asyncio.wait([drawing])

    made = service(NEVER, NEVER)
    asyncio.run(cancel(made))
    assert (made._engines.cancelled, images(made, "abandoned")) == (2, 2)
    made = service(NEVER, DeploymentUnavailableError("engines"))
    with pytest.raises(NotReadyError):
        asyncio.run(made.submit([JOB, JOB]))
    assert made._engines.cancelled == 1


def test_engine_in_trouble_is_not_healthy():
    class Queue:
        trouble = None

        def close(self):
            pass

    replica = object.__new__(EngineReplica)
    replica._queue = Queue()
    replica.check_health()
    replica._queue.trouble = "one pipeline call has been running for 61 s"
    with pytest.raises(GenerationError, match="one pipeline call has been running for 61 s"):
        replica.check_health()


def test_engine_is_stuck_after_twice_the_time_limit():
    engine = FakeEngine()
    replica = EngineReplica(lambda: engine, "fake", LIMITS, Cluster(request_seconds=0.2))
    engine.gate.clear()

    async def hang():
        drawing = asyncio.ensure_future(replica.generate(JOB))
        await asyncio.sleep(0.2)
        replica.check_health()
        await asyncio.sleep(0.4)
        with pytest.raises(GenerationError, match="one pipeline call has been running"):
            replica.check_health()
        drawing.cancel()
        await asyncio.wait([drawing])

    asyncio.run(hang())


def test_jobs_share_a_call_in_the_engine():
    engine = FakeEngine()
    replica = EngineReplica(lambda: engine, "fake", LIMITS, Cluster(batch_wait=5, largest_batch=3))

    async def ask():
        drawing = []
        for seed in range(3):
            drawing.append(asyncio.ensure_future(replica.generate(replace(JOB, seed=seed))))
            await asyncio.sleep(0.1)
        return await asyncio.gather(*drawing)

    assert len(asyncio.run(ask())) == 3
    assert [len(call) for call in engine.calls] == [3]


def test_failed_engine_exits_instead_of_refusing_jobs(monkeypatch):
    class Queue:
        async def submit(self, jobs, progress):
            raise NotReadyError("the server is not ready: failed", retry_after=5)

        def close(self):
            pass

    class Ended(BaseException):
        pass

    def end(status):
        raise Ended(status)

    replica = object.__new__(EngineReplica)
    replica._queue = Queue()
    monkeypatch.setattr(cluster.os, "_exit", end)
    with pytest.raises(Ended):
        asyncio.run(replica.generate(JOB))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_replicas": 0}, "min_replicas=0"),
        ({"min_replicas": 3, "max_replicas": 2}, "it must be 3 or more"),
        ({"cpus": 0}, "cpus=0"),
        ({"gpus": -1}, "gpus=-1 is not allowed: it must be 0 or more"),
        ({"capacity": 0}, "capacity=0"),
        ({"batch_wait": float("nan")}, "batch_wait=nan"),
    ],
)
def test_cluster_is_checked(options, message):
    with pytest.raises(ToMeConfigError, match=message):
        Cluster(**options)


# A server with two engines, in its own processes


class Server:
    def __init__(self, process, port, log):
        self.process, self.log = process, log
        headers = {"Authorization": "Bearer secret"}
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=240)

    def draw(self, **body):
        return self.http.post(OPENAI, json={"prompt": "fox", "steps": 3, **body})

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
        until(lambda: len(set(self.named("EngineReplica")) - set(replaced)) == 2, seconds=120)


def with_children(process):
    return [process, *process.children(recursive=True)]


def title(process):
    """The command line, which Ray replaces by a description of the process; empty if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


@contextmanager
def send_all(server, bodies):
    """Send all requests at once; yields the list of answers, complete when the context ends."""
    answers = [None] * len(bodies)

    def ask(place):
        answers[place] = server.draw(**bodies[place])

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(len(bodies))]
    for thread in threads:
        thread.start()
    yield answers
    for thread in threads:
        thread.join()


def data(answer):
    assert answer.status_code == 200, answer.text
    return [image["b64_json"] for image in answer.json()["data"]]


@contextmanager
def serving_on_ray(folder, log, *options):
    """`serve --ray` with two engines of two images a batch."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--replicas", "2", "--batch", "2", "--queue", "4", "--max-steps", "1000", "--timeout", "240", *options]
    command = [*PYTHON_M, "serve", "--ray", "--model", str(folder), "--port", str(port), *options]
    with log.open("w") as file:
        process = psutil.Popen(command, stdout=file, stderr=file, env={**os.environ, KEY_VARIABLE: "secret"})
    running = Server(process, port, log)
    try:
        until(lambda: "serving at" in log.read_text() or process.poll() is not None, seconds=300)
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
    refused = server.draw(size="64x64")
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, "size")
    assert httpx.get(f"{server.http.base_url}/").headers["content-type"].startswith("text/html"), "without a key"
    for host in MALFORMED_HOSTS:  # Ray's HTTP parser accepts them all
        assert (
            httpx.get(f"{server.http.base_url}/v1/models", headers={"Host": host.encode("latin-1")}).status_code == 400
        )
    assert server.log.read_text().count("malformed Host") == 1, "one line a minute"
    first, second = data(server.draw(seed=5, n=2))
    *_, completed, end = server.draw(seed=5, stream=True).text.split("\n\n")
    streamed = json.loads(completed.partition("data: ")[2])
    assert (streamed["b64_json"], streamed["batch"], end) == (first, 1, "") and streamed["seconds"] > 0
    assert first != second and data(server.draw(seed=5)) == [first] and data(server.draw(seed=6)) == [second]


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
    alone = data(server.draw(seed=3, steps=60))
    server.wait_for_engines()
    before = server.named("EngineReplica")
    # As many as two engines and the queue accept.
    with send_all(server, [{"seed": seed, "steps": 60} for seed in range(12)]) as answers:
        until(lambda: any(answers), seconds=120)  # both have work
        victim = next(iter(before))
        os.kill(victim, signal.SIGKILL)
    assert [answer.status_code for answer in answers] == [200] * 12
    assert len({data(answer)[0] for answer in answers}) == 12
    assert data(server.draw(seed=3, steps=60)) == alone
    assert "an engine died with a job (attempt 1 of 3)" in server.log.read_text()
    server.wait_for_engines(replaced=[victim])
    assert server.accepted() == 0


def test_every_request_is_answered_with_a_full_queue(server):
    server.wait_for_engines()
    with send_all(server, [{"seed": seed, "steps": 60} for seed in range(24)]) as answers:
        pass
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 429} and statuses.count(200) >= 12
    assert all(int(answer.headers["Retry-After"]) >= 1 for answer in answers if answer.status_code == 429)


@pytest.mark.parametrize("stream", [False, True])
def test_disconnection_frees_the_place(server, stream):
    before = server.count("images_total", outcome="abandoned")
    with pytest.raises(httpx.ReadTimeout):
        server.http.post(OPENAI, json={"prompt": "fox", "steps": 900, "n": 4, "stream": stream}, timeout=1)
    until(lambda: server.count("images_total", outcome="abandoned") == before + 4)
    start = monotonic()
    data(server.draw())
    assert monotonic() - start < 5, "the engines still run 900 steps"


def test_killed_app_answers_with_an_error_and_is_restarted(server):
    (victim,) = server.named("ppdiffusers_tome-http")
    with send_all(server, [{"seed": seed, "steps": 60} for seed in range(4)]) as answers:
        until(lambda: server.accepted() == 4)
        os.kill(victim, signal.SIGKILL)
    assert {answer.status_code for answer in answers} <= {500, 502, 503}
    until(lambda: server.http.get("/ready").status_code == 200, seconds=120)
    data(server.draw())


def test_sigterm_finishes_accepted_requests_and_ends_all_processes(server):
    server.wait_for_engines()
    children = server.process.children(recursive=True)
    with send_all(server, [{"seed": seed, "steps": 60} for seed in range(6)]) as answers:
        until(lambda: server.accepted() == 6)
        server.process.send_signal(signal.SIGTERM)
        late = httpx.Response(0)
        while late.status_code != 503:  # until the signal has arrived
            late = server.draw(steps=1)
    assert int(late.headers["Retry-After"]) >= 1
    assert [answer.status_code for answer in answers] == [200] * 6
    assert server.process.wait(120) == 0, server.log.read_text()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive


# Offline

ANIMALS = ("fox", "owl", "cat", "dog", "bee", "ant", "cow", "hen")


def generate_on_ray_and_here(folder, tmp_path, kill, *options):
    """Eight prompts on Ray, with a call of `kill` after the first images, give the same bytes as in one process."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"a 3d render of {animal}\n" for animal in ANIMALS))
    arguments = [
        "--prompts",
        prompts,
        "--model",
        folder,
        "--steps",
        "50",
        "--batch",
        "2",
        "--threads",
        "1",
        "--output",
    ]
    command = [*PYTHON_M, "generate", *map(str, arguments)]
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
        next(child for child in with_children(process) if "EngineActor.generate" in title(child)).kill()

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
    image_options.add_options(parser)
    parsed = parser.parse_args(["--ray", *options])
    if isinstance(expected, int):
        assert image_options.threads(parsed) == expected
    else:
        with pytest.raises(ToMeConfigError, match=expected):
            image_options.threads(parsed)


# Several nodes on one machine, each with its own raylet, workers and object store

NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
QUICK = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_timeout_ms": 1000}


@pytest.fixture
def nodes():
    """Three nodes: a head without room for engines, and two with room for one engine each."""
    nodes = Nodes(True, head_node_args={**NODE, "num_cpus": 0, "include_dashboard": False, "_system_config": QUICK})
    try:
        for _ in range(2):
            nodes.add_node(**NODE)
        yield nodes
    finally:
        nodes.shutdown()


def processes_of(node):
    return with_children(psutil.Process(node.all_processes["raylet"][0].process.pid))


def runs(node, name):
    return any(name in title(process) for process in processes_of(node))


def test_lost_node_loses_no_request(nodes, exported_folder, tmp_path):
    first, second = nodes.worker_nodes
    with serving_on_ray(exported_folder, tmp_path / "log", "--ray-address", nodes.address) as server:
        assert runs(nodes.head_node, "ppdiffusers_tome-http")
        assert runs(first, "EngineReplica") and runs(second, "EngineReplica")
        bodies = [{"seed": seed, "steps": 60} for seed in range(12)]
        with send_all(server, bodies) as answers:
            until(lambda: any(answers), seconds=120)  # both engines have work
            nodes.remove_node(first, allow_graceful=False)  # with no room for another engine
        drawn = [data(answer) for answer in answers]
        third = nodes.add_node(**NODE)
        until(lambda: runs(third, "EngineReplica"), seconds=60)
        with send_all(server, bodies) as answers:
            until(lambda: any(answers), seconds=120)
            frozen = processes_of(second)  # like a network failure: its connections stay open
            for process in frozen:
                process.suspend()
        assert [data(answer) for answer in answers] == drawn
        for process in frozen:
            process.kill()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(120) == 0, server.log.read_text()


def test_lost_node_loses_no_prompt(nodes, exported_folder, tmp_path):
    def kill(process):
        node = next(node for node in nodes.worker_nodes if runs(node, "EngineActor.generate"))
        nodes.remove_node(node, allow_graceful=False)

    generate_on_ray_and_here(exported_folder, tmp_path, kill, "--ray-address", nodes.address)


POISON = """
import os, json, sys
from PIL import Image
from ppdiffusers_tome.generation.jobs import GenerationError
from ppdiffusers_tome.generation.jobs import Job
from ppdiffusers_tome.generation.prompt_file import Prompt
from ppdiffusers_tome.generation.offline import Failure
from ppdiffusers_tome.generation.ray_session import ray_session
from ppdiffusers_tome.generation.actors import ActorStartError, generate_on_actors

class Engine:
    name, sampler, methods = "model", "DDIM", {}
    def batch_key(self, job):
        return "same"
    def generate(self, jobs, should_stop=None):
        if any("die" in job.prompt for job in jobs):
            os._exit(1)
        if any("black" in job.prompt for job in jobs):
            raise GenerationError("not finite")
        return [Image.new("RGB", (8, 8)) for job in jobs]

def load():
    raise OSError("no such model")

def crash(log=sys.argv[1]):
    with open(log, "a") as file:
        file.write("x")
    os._exit(1)

prompts = [Prompt(i, Job(text, 8, 8, 0.5, seed=i)) for i, text in enumerate(["a", "die", "black"])]
with ray_session(None, 1, 0, shows_logs=False):
    drawn = {p.index: d.reason if isinstance(d, Failure) else "png"
             for p, d in generate_on_actors(Engine, 1)([prompts[:1], prompts[1:2], prompts[2:]])}
    for broken in (load, crash):
        try:
            list(generate_on_actors(broken, 1)([prompts[:1]]))
        except ActorStartError as error:
            drawn[broken.__name__] = str(error)
print("RESULT", json.dumps(drawn))
"""


def test_prompt_that_kills_actors_fails_and_so_does_a_model_that_does_not_load(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", POISON, str(tmp_path / "log")]
    done = subprocess.run(command, capture_output=True, text=True)
    drawn = json.loads(done.stdout.partition("RESULT ")[2])
    load, crash = drawn.pop("load"), drawn.pop("crash")
    assert drawn == {"0": "png", "1": "3 actors died with this prompt", "2": "GenerationError: not finite"}
    assert load == "no actor could load the model, in 3 attempts each: no such model"
    assert crash.startswith("no actor could load the model, in 3 attempts each: The actor")
    assert (tmp_path / "log").read_text() == "xxx"


def test_evaluation_on_actors_writes_the_same_images(tmp_path):
    model = tmp_path / "model"
    tiny_pipeline().save_pretrained(str(model))
    (model / "prompts.txt").write_text("a fox\nan owl\n")
    options = ["--model", str(model), "--backend", "eager", "--ratio", "0.5", "--ablations", "--count", "4"]
    options += ["--batch", "2", "--size", "32", "--steps", "1", "--threads", "1"]
    command = [*PYTHON_M, "evaluate", *options, "--output"]
    subprocess.run([*command, "ray", "--ray", "--actors", "2"], check=True, cwd=tmp_path)
    subprocess.run([*command, "here"], check=True, cwd=tmp_path)
    drawn = [
        {path.name: path.read_bytes() for path in (tmp_path / out / "images").rglob("*.png")}
        for out in ("ray", "here")
    ]
    assert drawn[0] == drawn[1] and len(drawn[0]) == 3 * 4
