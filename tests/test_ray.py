"""On Ray: engines are killed under load, and no picture is lost. Only `make test-ray` runs this; it takes minutes."""

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
from time import monotonic

import httpx
import psutil
import pytest
from conftest import tiny_pipeline
from serving_support import OPENAI, until

from ppdiffusers_tome import ToMeConfigError
from ppdiffusers_tome.serving.errors import DrawingError, NotReadyError, QueueFullError
from ppdiffusers_tome.serving.jobs import Job, Limits
from ppdiffusers_tome.serving.metrics import Metrics
from ppdiffusers_tome.serving.settings import KEY_VARIABLE

pytest.importorskip("ray", reason="'make test-ray' installs it")
pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(600),
]  # the warnings are Ray's

from ray.exceptions import ActorDiedError, ActorUnavailableError  # noqa: E402
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError  # noqa: E402

from ppdiffusers_tome.serving import replicas  # noqa: E402
from ppdiffusers_tome.serving.replicas import ATTEMPTS, Cluster, ClusterService, EngineReplica  # noqa: E402

LIMITS = Limits(sizes=((32, 32),), ratios=(0.5,))
JOB = Job("fox", 32, 32, 0.5, seed=0)
PYTHON_M = (sys.executable, "-W", "ignore", "-m", "ppdiffusers_tome")
LOST = (ActorDiedError(), ActorUnavailableError("gone", b"0" * 16))


# The service of the app, over engines that are told how to die


class Answers:
    """Stands for Ray's handle: gives out, or raises, what it is told, and counts."""

    def __init__(self, *answers):
        self.answers, self.calls, self.cancelled = list(answers), 0, 0

    @property
    def draw(self):
        return self

    def remote(self, job):
        self.calls += 1
        return _Answer(self, self.answers.pop(0))


class _Answer:
    def __init__(self, answers, answer):
        self.answers, self.answer = answers, answer

    def __await__(self):
        if self.answer is None:
            yield from asyncio.sleep(60).__await__()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def cancel(self):
        self.answers.cancelled += 1


@pytest.fixture
def service(monkeypatch):
    monkeypatch.setattr(replicas.serve, "get_deployment_handle", lambda *names: None)
    monkeypatch.setattr(replicas, "RETRY_SECONDS", 0.0)

    def make(*answers):
        made = ClusterService("model", "DDIM", LIMITS, Metrics(), accepted=2)
        made._engines = Answers(*answers)
        return made

    return make


def pictures(service, outcome):
    return service.metrics.registry.get_sample_value("ppdiffusers_tome_pictures_total", {"outcome": outcome})


def test_a_job_whose_engine_died_is_drawn_by_another(service):
    made = service(*LOST, "picture")
    assert asyncio.run(made.submit([JOB])) == ["picture"]
    assert (made._engines.calls, pictures(made, "drawn"), pictures(made, "failed")) == (3, 1, 0)


def test_a_job_that_kills_engines_is_given_up(service):
    made = service(*[LOST[0]] * ATTEMPTS, "never asked")
    with pytest.raises(DrawingError, match="3 engines died"):
        asyncio.run(made.submit([JOB]))
    assert (made._engines.calls, pictures(made, "failed")) == (ATTEMPTS, 1)


def test_a_full_queue_refuses_what_is_new_and_not_what_was_accepted(service):
    full = BackPressureError(num_queued_requests=4, max_queued_requests=4)
    with pytest.raises(QueueFullError) as refused:
        asyncio.run(service(full).submit([JOB]))
    assert refused.value.retry_after >= 1
    assert asyncio.run(service(LOST[0], full, full, "picture").submit([JOB])) == ["picture"]


def test_no_more_is_accepted_than_may_be_under_way(service):
    async def ask(made):
        drawing = asyncio.ensure_future(made.submit([JOB]))
        await asyncio.sleep(0.01)
        with pytest.raises(QueueFullError, match="1 pictures are under way, of 2"):
            await made.submit([JOB, JOB])
        assert await made.submit([JOB]) == ["picture"]
        drawing.cancel()
        await asyncio.wait([drawing])
        assert await made.submit([JOB, JOB]) == ["a", "b"]

    made = service(None, "picture", "a", "b")
    asyncio.run(ask(made))
    assert made._engines.calls == 4


def test_without_engines_nothing_is_accepted(service):
    with pytest.raises(NotReadyError, match="no engine could be started"):
        asyncio.run(service(DeploymentUnavailableError("engines")).submit([JOB]))


def test_who_hangs_up_or_is_refused_in_part_abandons_all_of_it(service):
    async def hang_up(made):
        drawing = asyncio.ensure_future(made.submit([JOB, JOB]))
        await asyncio.sleep(0.01)
        drawing.cancel()
        await asyncio.wait([drawing])

    made = service(None, None)
    asyncio.run(hang_up(made))
    assert (made._engines.cancelled, pictures(made, "abandoned")) == (2, 2)
    made = service(None, BackPressureError(num_queued_requests=4, max_queued_requests=4))
    with pytest.raises(QueueFullError):
        asyncio.run(made.submit([JOB, JOB]))
    assert made._engines.cancelled == 1


def test_an_engine_that_hangs_or_has_failed_is_not_healthy():
    class Queue:
        state, running_since = "ready", None

        def close(self):
            pass

    replica = object.__new__(EngineReplica)
    replica._queue, replica._stuck_seconds = Queue(), 60
    replica.check_health()
    replica._queue.running_since = monotonic() - 59
    replica.check_health()
    replica._queue.running_since = monotonic() - 61
    with pytest.raises(DrawingError, match="more than 60 s"):
        replica.check_health()
    replica._queue = Queue()
    replica._queue.state = "failed"
    with pytest.raises(DrawingError, match="thread that draws has ended"):
        replica.check_health()


def test_an_engine_that_has_failed_ends_before_it_refuses_all_that_comes(monkeypatch):
    class Queue:
        async def submit(self, jobs):
            raise NotReadyError("the server is not ready: failed", retry_after=5)

        def close(self):
            pass

    class Ended(BaseException):
        pass

    def end(status):
        raise Ended(status)

    replica = object.__new__(EngineReplica)
    replica._queue = Queue()
    monkeypatch.setattr(replicas.os, "_exit", end)
    with pytest.raises(Ended):
        asyncio.run(replica._draw(JOB))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_replicas": 0}, "min_replicas=0"),
        ({"min_replicas": 3, "max_replicas": 2}, "it must be min_replicas=3 or more"),
        ({"cpus": 0}, "cpus=0"),
        ({"gpus": -1}, "gpus=-1 is not allowed: it must not be negative"),
        ({"capacity": 0}, "capacity=0"),
    ],
)
def test_cluster_is_checked(options, message):
    with pytest.raises(ToMeConfigError, match=message):
        Cluster(**options)


# A server on two engines, as people run it


class Server:
    def __init__(self, process, port, log):
        self.process, self.log = process, log
        headers = {"Authorization": "Bearer secret"}
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=120)

    def draw(self, **body):
        return self.http.post(OPENAI, json={"prompt": "fox", "steps": 3, **body})

    def named(self, name):
        """Processes of Ray's whose title holds a name, by process id."""
        found = {}
        for child in self.process.children(recursive=True):
            try:
                if name in " ".join(child.cmdline()):
                    found[child.pid] = child
            except psutil.NoSuchProcess:
                continue
        return found

    def count(self, name, **labels):
        wanted = ",".join(f'{key}="{value}"' for key, value in labels.items())
        pattern = rf"^ppdiffusers_tome_{name}{re.escape('{' + wanted + '}') if labels else ''} (\S+)$"
        found = re.search(pattern, self.http.get("/metrics").text, re.M)
        return float(found[1])

    def wait_for_engines(self, replaced=()):
        until(lambda: len(set(self.named("EngineReplica")) - set(replaced)) == 2, seconds=120)


@contextmanager
def crowd(server, bodies):
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
    return [each["b64_json"] for each in answer.json()["data"]]


@pytest.fixture(scope="module")
def server(exported_folder, tmp_path_factory):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("ray") / "log"
    options = ["--replicas", "2", "--replica-cpus", "0.5", "--batch", "2", "--queue", "4", "--max-steps", "1000"]
    command = [*PYTHON_M, "serve", "--ray", "--model", str(exported_folder), "--port", str(port), *options]
    with log.open("w") as file:
        process = psutil.Popen(command, stdout=file, stderr=file, env={**os.environ, KEY_VARIABLE: "secret"})
    running = Server(process, port, log)
    try:
        until(lambda: "serving at" in log.read_text() or process.poll() is not None, seconds=300)
        assert process.poll() is None, log.read_text()
        yield running
    finally:
        running.http.close()
        everything = process.children(recursive=True) if process.is_running() else []
        for each in [*everything, process]:
            if each.is_running():
                each.kill()
        process.wait()


def test_the_app_is_the_same(server):
    assert server.http.get("/ready").json() == {"state": "ready"}
    assert httpx.get(f"{server.http.base_url}/v1/models").status_code == 401
    refused = server.draw(size="64x64")
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, "size")
    first, second = data(server.draw(seed=5, n=2))
    assert first != second and data(server.draw(seed=5)) == [first] and data(server.draw(seed=6)) == [second]


def test_ray_can_be_reached_from_this_machine_only(server):
    listening = [
        connection.laddr
        for each in server.process.children(recursive=True)
        for connection in each.connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    own = ipaddress.ip_network("127.0.0.0/8")
    addresses = [ipaddress.ip_address(address.ip.removeprefix("::ffff:")) for address in listening]
    assert addresses and not [address for address in addresses if address not in own]


def test_an_engine_that_is_killed_under_load_is_replaced_and_no_picture_lost(server):
    alone = data(server.draw(seed=3, steps=100))
    server.wait_for_engines()
    before = server.named("EngineReplica")
    # As many as two engines and the queue take: what the dead one had must wait for a place.
    with crowd(server, [{"seed": seed, "steps": 100} for seed in range(12)]) as answers:
        until(lambda: server.count("waiting_pictures") == 12)
        victim = next(iter(before))
        os.kill(victim, signal.SIGKILL)
    assert [answer.status_code for answer in answers] == [200] * 12
    assert len({data(answer)[0] for answer in answers}) == 12
    assert data(server.draw(seed=3, steps=100)) == alone
    assert "an engine died, and a job with it (1 of 3 times)" in server.log.read_text()
    server.wait_for_engines(replaced=[victim])
    assert server.count("waiting_pictures") == 0


def test_a_full_queue_is_told_and_every_request_answered(server):
    server.wait_for_engines()
    with crowd(server, [{"seed": seed, "steps": 60} for seed in range(24)]) as answers:
        pass
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 429} and statuses.count(200) >= 12
    assert all(int(answer.headers["Retry-After"]) >= 1 for answer in answers if answer.status_code == 429)


def test_a_client_that_hangs_up_frees_its_place(server):
    before = server.count("pictures_total", outcome="abandoned")
    with pytest.raises(httpx.ReadTimeout):
        server.http.post(OPENAI, json={"prompt": "fox", "steps": 900, "n": 4}, timeout=1)
    until(lambda: server.count("pictures_total", outcome="abandoned") == before + 4)
    start = monotonic()
    data(server.draw())
    assert monotonic() - start < 5, "engines still draw 900 steps"


def test_an_app_that_is_killed_answers_with_an_error_and_comes_back(server):
    (victim,) = server.named("ppdiffusers_tome-http")
    with crowd(server, [{"seed": seed, "steps": 100} for seed in range(4)]) as answers:
        until(lambda: server.count("waiting_pictures") == 4)
        os.kill(victim, signal.SIGKILL)
    assert {answer.status_code for answer in answers} <= {500, 502, 503}
    until(lambda: server.http.get("/ready").status_code == 200, seconds=120)
    data(server.draw())


def test_sigterm_finishes_what_was_accepted_and_leaves_no_process(server):
    server.wait_for_engines()
    everything = server.process.children(recursive=True)
    with crowd(server, [{"seed": seed, "steps": 100} for seed in range(6)]) as answers:
        until(lambda: server.count("waiting_pictures") == 6)
        server.process.send_signal(signal.SIGTERM)
    assert [answer.status_code for answer in answers] == [200] * 6
    assert server.process.wait(120) == 0, server.log.read_text()
    _, alive = psutil.wait_procs(everything, timeout=30)
    assert not alive


# Offline

ANIMALS = ("fox", "owl", "cat", "dog", "bee", "ant", "cow", "hen")


def test_an_actor_that_is_killed_is_replaced_and_no_prompt_lost(tmp_path, exported_folder):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"a 3d render of {animal}\n" for animal in ANIMALS))
    given = ["--prompts", prompts, "--model", exported_folder, "--steps", "100", "--batch", "2", "--threads", "1"]
    command = [*PYTHON_M, "generate", *map(str, given), "--out"]
    process = psutil.Popen([*command, str(tmp_path / "ray"), "--ray"], stdout=subprocess.PIPE, text=True)
    try:
        until(lambda: len(list((tmp_path / "ray").glob("0*.png"))) >= 2, seconds=300)
        actors = [each for each in process.children(recursive=True) if "EngineActor.draw" in " ".join(each.cmdline())]
        actors[0].kill()
        printed, _ = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            process.kill()
    assert process.returncode == 0 and "8 made, 0 skipped (already there), 0 failed of 8" in printed
    subprocess.run([*command, str(tmp_path / "here")], check=True)
    here, there = ({path.name: path.read_bytes() for path in (tmp_path / d).glob("*.png")} for d in ("here", "ray"))
    assert here == there and len(here) == 8


POISON = """
import os, json, sys
from PIL import Image
from ppdiffusers_tome.serving.jobs import Job
from ppdiffusers_tome.serving.prompts import Prompt
from ppdiffusers_tome.serving.offline import Failure
from ppdiffusers_tome.serving.ray_session import ray_session
from ppdiffusers_tome.serving.actors import ActorStartError, draw_on_actors

class Engine:
    name, sampler = "model", "DDIM"
    def batch_key(self, job):
        return "same"
    def generate(self, jobs, should_stop=None):
        if any("die" in job.prompt for job in jobs):
            os._exit(1)
        return [Image.new("RGB", (8, 8)) for job in jobs]

def load():
    raise OSError("no such model")

prompts = [Prompt(i, Job(text, 8, 8, 0.5, seed=i)) for i, text in enumerate(["a", "die", "c"])]
with ray_session(None, 1, 0, shows_logs=False):
    drawn = {p.index: d.reason if isinstance(d, Failure) else "png"
             for p, d in draw_on_actors(Engine, 1)([prompts[:1], prompts[1:2], prompts[2:]])}
    try:
        list(draw_on_actors(load, 1)([prompts[:1]]))
    except ActorStartError as error:
        drawn["start"] = str(error)
print("RESULT", json.dumps(drawn))
"""


def test_a_prompt_that_kills_actors_is_given_up_and_so_is_a_model_that_does_not_load():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", POISON], capture_output=True, text=True)
    drawn = json.loads(done.stdout.partition("RESULT ")[2])
    start = drawn.pop("start")
    assert drawn == {"0": "png", "1": "3 actors died while they drew it", "2": "png"}
    assert "3 actors in a row could not load the model" in start and "no such model" in start


def test_an_evaluation_on_actors_draws_what_one_process_draws(tmp_path):
    model = tmp_path / "model"
    tiny_pipeline().save_pretrained(str(model))
    (model / "prompts.txt").write_text("a fox\nan owl\n")
    options = ["--model", str(model), "--backend", "eager", "--ratio", "0.5", "--ablations", "--count", "4"]
    options += ["--batch", "2", "--size", "32", "--steps", "1", "--rounds", "0", "--threads", "1"]
    command = [*PYTHON_M, "evaluate", *options, "--out"]
    subprocess.run([*command, "ray", "--ray", "--actors", "2"], check=True, cwd=tmp_path)
    subprocess.run([*command, "here"], check=True, cwd=tmp_path)
    drawn = [
        {path.name: path.read_bytes() for path in (tmp_path / out / "pictures").rglob("*.png")}
        for out in ("ray", "here")
    ]
    assert drawn[0] == drawn[1] and len(drawn[0]) == 3 * 4
