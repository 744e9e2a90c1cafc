"""A server in a thread, with an engine that returns images of one colour at once."""

import json
import socket
import threading
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPResponse
from time import monotonic, sleep

import httpx
from PIL import Image

from ppdiffusers_tome.run.sizes import Size
from ppdiffusers_tome.serving.app import create_app
from ppdiffusers_tome.serving.app_config import AppConfig
from ppdiffusers_tome.serving.image_engine import ServedModel
from ppdiffusers_tome.serving.jobs import AbandonedError, GenerationError
from ppdiffusers_tome.serving.limits import Limits
from ppdiffusers_tome.serving.pool import EnginePool
from ppdiffusers_tome.serving.prometheus import Metrics
from ppdiffusers_tome.serving.queue import JobQueue
from ppdiffusers_tome.serving.server import DrainingServer, listen

LIMITS = Limits(
    sizes=(Size(48, 64), Size(64, 64)),
    ratios=(0.5, 0.0),
    image_to_image=True,
    prompt_characters=100,
    images=3,
    steps=50,
)
OPENAI = "/v1/images/generations"
EDITS = "/v1/images/edits"
TEXT = "/sdapi/v1/txt2img"
IMAGE = "/sdapi/v1/img2img"
# In 0.5.0 to 0.10.3 some decided whether a request needs the key, and others were a traceback.
MALFORMED_HOSTS = ("x/health?", "x/ready?", "x/page/?", "x/page/#", "/health", "?", "#", "[", "]", "[evil]", "a]b")
MALFORMED_HOSTS += ("[::1", "a@b", "a b", "x:y", "\xe9")


class FakeEngine:
    """Images of one colour, which depends on the seed. Its attributes block or slow down the steps.

    A prompt may ask for a failure.
    """

    name, sampler, methods = "fake", "DDIM", {0.5: "todo, min_tokens=64", 0.0: ""}
    can_batch = True
    program_loads = 0
    clock = None  # a `Clock`: steps take their time by it, and none by any other

    def __init__(self, step_seconds=0.0):
        self.calls = []  # the jobs of every call
        self.steps_done = 0
        self.gate = threading.Event()  # while it is not set, every step waits
        self.gate.set()
        self.step_seconds = step_seconds
        self.pause_at = None  # a step before which the gate closes
        self.started = threading.Semaphore(0)  # released at the start of every call
        self.programs = []  # events: each loads when it is set

    def count_tokens(self, prompt):
        """Words, of which the text encoder reads the first five."""
        words = prompt.split()
        return len(words) + 2, 7, " ".join(words[5:])

    def load_next(self):
        if self.programs:
            self.programs[0].wait(60)
            self.programs.pop(0)
        return bool(self.programs)

    def generate(self, jobs, should_stop=None):
        self.calls.append(list(jobs))
        self.started.release()
        for step in range(jobs[0].steps):
            if step == self.pause_at:
                self.gate.clear()
            while not self.gate.wait(0.01):
                if should_stop(step, jobs[0].steps):
                    raise AbandonedError("gone")
            if self.clock is None:
                sleep(self.step_seconds)
            else:
                self.clock.now += self.step_seconds
            if should_stop(step + 1, jobs[0].steps):
                raise AbandonedError("gone")
            self.steps_done += 1
        for job in jobs:
            if job.prompt in ("explode", f"explode at seed {job.seed}"):
                raise RuntimeError("secret reason")
            if job.prompt == "damaged":
                raise GenerationError("an image has values that are not finite")
        return [self.paint(job) for job in jobs]

    def paint(self, job):
        return Image.new("RGB", (job.size.width, job.size.height), (job.seed % 256, 0, 0))


class Clock:
    """Seconds that only a test moves, in place of time.monotonic()."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Running:
    """A running server, its parts, and clients for tests."""

    def __init__(self, pool, metrics, server, engine, port, thread):
        self.pool, self.queue, self.metrics = pool, pool.queue, metrics
        self.server, self.engine, self.port, self.thread = server, engine, port, thread
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=120)

    def post(self, path, body=None, **rest):
        return self.http.post(path, json=body, **rest) if body is not None else self.http.post(path, **rest)

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def count(self, name, **labels):
        return self.metrics.registry.get_sample_value(f"ppdiffusers_tome_{name}", labels) or 0

    def requests(self, status):
        """The number of requests with this status, over all endpoints."""
        samples = [sample for metric in self.metrics.registry.collect() for sample in metric.samples]
        counts = [sample for sample in samples if sample.name == "ppdiffusers_tome_requests_total"]
        return sum(sample.value for sample in counts if sample.labels["status"] == str(status))


@contextmanager
def serving(
    engine=None, limits=LIMITS, config=None, load=None, name="fake", methods=None, seconds=120, port=0, **options
):
    """A ready server on 127.0.0.1, on a free port unless one is given, closed at the end.

    `methods` are by default the engine's; `options` are those of the queue and of the pool.
    """
    engine, metrics = engine or FakeEngine(), Metrics()
    queue_options = {key: options.pop(key) for key in ("capacity", "max_batch", "batch_wait") if key in options}
    pool = EnginePool(
        lambda is_unwanted: load() if load else engine, JobQueue(metrics, **queue_options), metrics, **options
    )
    config = replace(config or AppConfig(steps=2), hosts=("x",))  # the Host header of requests written by hand
    app = create_app(ServedModel(name, engine.sampler, methods or engine.methods, limits), pool, metrics, config)
    listener = listen("127.0.0.1", port)
    port = listener.getsockname()[1]  # before the start: a server whose model does not load closes it
    server = DrainingServer(app, pool, seconds, config.keep_alive_seconds)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    pool.start()
    thread.start()
    running = Running(pool, metrics, server, engine, port, thread)
    try:
        until(lambda: server.started)
        if load is None:
            until(lambda: pool.state == "ready")
        yield running
    finally:
        running.http.close()
        server.should_exit = server.force_exit = True
        pool.close()
        thread.join()
        listener.close()


def until(condition, seconds=120):
    """Wait until condition() is true; fail after `seconds`."""
    end = monotonic() + seconds
    while not condition():
        assert monotonic() < end, f"not true after {seconds} s"
        sleep(0.005)


def read_answer(client):
    """Status and JSON of the next answer on a socket."""
    answer = HTTPResponse(client)
    answer.begin()
    return answer.status, json.loads(answer.read())


def events_of(answer):
    """The data of all events of an answer; the name of each is its type."""
    parts = [part.split("\n") for part in answer.text.removesuffix("\n\n").split("\n\n")]
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert all(name == f"event: {json.loads(data[6:])['type']}" for name, data in parts)
    return [json.loads(data.removeprefix("data: ")) for _, data in parts]


def assert_refused_whatever_the_host(app, client):
    """Without the key, all routes that need one answer 401, or 400; the others answer."""
    others = ("/nosuch", "/x%0aforged", "/health/", "/healthz", "/page", "/v1/models/")
    paths = {route.path.replace("{name:path}", "nosuch") for route in app.routes}.union(others)
    hosts = (*MALFORMED_HOSTS, "health", "[::1]:80")
    # All paths with one host, and all hosts with some paths.
    pairs = [(path, host) for path in sorted(paths) for host in hosts[:1]]
    pairs += [(path, host) for path in ("/health", "/page/nosuch", "/metrics", OPENAI) for host in hosts]
    for path, host in pairs:
        is_open = path in ("/", "/health", "/health/", "/ready") or path.startswith("/page/")
        for method in ("GET", "POST"):
            answer = client.request(method, path, headers={"Host": host.encode("latin-1")})
            expected = (200, 404, 405) if is_open else (400, 401)
            assert answer.status_code in expected, (method, path, host, answer.status_code)
