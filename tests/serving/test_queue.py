"""The queue behind HTTP: bounded, batched, cancelled with its clients, drained, never stuck."""

import json
import pickle
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from math import inf, nan
from time import sleep

import httpx
import pytest
from serving_support import IMAGE, LIMITS, OPENAI, TEXT, Clock, FakeEngine, events_of, serving, until

from ppdiffusers_tome import ToMeConfigError
from ppdiffusers_tome.errors import ParameterError
from ppdiffusers_tome.serving import pool as pool_module
from ppdiffusers_tome.serving import queue as queue_module
from ppdiffusers_tome.serving import tickets
from ppdiffusers_tome.serving.app_config import AppConfig
from ppdiffusers_tome.serving.jobs import AbandonedError, EngineLostError
from ppdiffusers_tome.serving.queue import ImageQueue
from ppdiffusers_tome.serving.tickets import Progress


def ask(server, seed=0, **changes):
    return server.post(OPENAI, {"prompt": "fox", "seed": seed, **changes})


@pytest.fixture
def pool():
    with ThreadPoolExecutor(16) as executor:
        yield executor


@pytest.fixture
def clock(monkeypatch):
    """The clock of the queue. Its `batch_wait` must be 0, because time stands still while it waits."""
    clock = Clock()
    monkeypatch.setattr(queue_module, "monotonic", clock)
    monkeypatch.setattr(tickets, "monotonic", clock)
    return clock


def block(server, pool, seed=99):
    """Send one request that stays in the engine; returns its future."""
    server.engine.gate.clear()
    blocking = pool.submit(ask, server, seed, steps=1)
    assert server.engine.started.acquire(timeout=60)
    return blocking


def wait_for_queue(server, images):
    until(lambda: server.count("waiting_images") == images)


def test_only_compatible_jobs_share_a_call(pool):
    with serving(max_batch=4) as server:
        blocking = block(server, pool)
        requests = [pool.submit(ask, server, seed) for seed in range(3)]
        wait_for_queue(server, 3)
        others = [
            pool.submit(ask, server, 10, steps=3),
            pool.submit(ask, server, 11, guidance_scale=2.0),
            pool.submit(ask, server, 12, size="64x64"),
            pool.submit(ask, server, 13, tome_ratio=0.0),
        ]
        wait_for_queue(server, 7)
        late = [pool.submit(ask, server, seed) for seed in (20, 21)]
        wait_for_queue(server, 9)
        server.engine.gate.set()
        all_requests = [blocking, *requests, *others, *late]
        assert [one.result().status_code for one in all_requests] == 10 * [200]
        sizes = [len(jobs) for jobs in server.engine.calls]
        assert sizes == [1, 4, 1, 1, 1, 1, 1], "three and one late request, the others alone, the other late one"
        assert {job.seed for job in server.engine.calls[1]} < {0, 1, 2, 20, 21}
        for one, seed in zip(requests, range(3), strict=True):
            assert one.result().json()["data"][0]["seed"] == seed
        assert server.count("batch_images_sum") == 10 and server.count("images_total", outcome="generated") == 10


def test_oldest_job_waits_at_most_batch_wait(pool):
    with serving(batch_wait=0.5) as server:
        together = [pool.submit(ask, server, seed) for seed in range(2)]
        [one.result() for one in together]
        assert [len(jobs) for jobs in server.engine.calls] == [2]
        ask(server)
        assert [len(jobs) for jobs in server.engine.calls] == [2, 1]


def test_full_queue_answers_429_at_once(pool):
    with serving(capacity=3) as server:
        blocking = block(server, pool)
        accepted = [pool.submit(ask, server, seed) for seed in range(2)]
        wait_for_queue(server, 2)
        refused = ask(server, n=2)
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) >= 1
        accepted.append(pool.submit(ask, server, 5))
        wait_for_queue(server, 3)
        answer = server.post(TEXT, {"prompt": "fox"})
        assert answer.status_code == 429 and "detail" in answer.json() and "retry-after" in answer.headers
        answer = ask(server, stream=True)
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
        assert server.post(IMAGE, {"init_images": ["broken"]}).status_code == 429, "it is decoded when it has a place"
        assert server.http.get("/ready").status_code == 200, "a full queue is ready"
        server.engine.gate.set()
        assert [one.result().status_code for one in (blocking, *accepted)] == 4 * [200]
        assert ask(server).status_code == 200 and server.post(IMAGE, {"init_images": ["broken"]}).status_code == 422


def fill(server, pool, steps):
    """Send one request that runs and three that wait, all incompatible; returns their futures."""
    calls = [partial(ask, server, seed, steps=steps, guidance_scale=2.0 + seed) for seed in range(4)]
    first = pool.submit(calls[0])
    assert server.engine.started.acquire(timeout=60)
    others = [pool.submit(call) for call in calls[1:]]
    wait_for_queue(server, 3)
    return [first, *others]


def test_retry_after_estimates_when_there_is_room(pool, clock):
    """The waiting images take much longer than earlier ones: 50 steps instead of 2, and one per call."""
    with serving(FakeEngine(0.03), capacity=3, max_batch=2, batch_wait=0) as server:
        server.engine.clock = clock
        assert ask(server, steps=2).status_code == 200
        assert server.engine.started.acquire(timeout=60)
        server.engine.pause_at = 20
        requests = fill(server, pool, steps=50)
        until(lambda: server.queue.progress().step == 20)
        refused = [ask(server, n=images, steps=1) for images in (1, 2, 3)]
        assert [answer.status_code for answer in refused] == 3 * [429]
        # The running image needs another 0.9 s, after which one place is free, and those behind it 1.5 s each.
        assert [answer.headers["retry-after"] for answer in refused] == ["1", "3", "4"]
        server.engine.pause_at = None
        server.engine.gate.set()
        assert [one.result().status_code for one in requests] == 4 * [200]


def test_retry_after_during_the_first_call(pool, clock):
    with serving(FakeEngine(0.1), capacity=3, batch_wait=0) as server:
        server.engine.clock, server.engine.pause_at = clock, 5
        requests = fill(server, pool, steps=50)
        until(lambda: server.queue.progress().step == 5)
        assert ask(server).headers["retry-after"] == "5", "the running image needs another 4.5 s"
        server.engine.pause_at = None
        server.engine.gate.set()
        assert [one.result().status_code for one in requests] == 4 * [200]


def test_one_request_must_fit_the_queue():
    with pytest.raises(ToMeConfigError, match="capacity=2 is not allowed: one request may ask for 3 images"):
        ImageQueue(FakeEngine, "fake", LIMITS, capacity=2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_batch", 0),
        *(("batch_wait", seconds) for seconds in (-0.1, 61.0, nan)),
        *(("stuck_seconds", seconds) for seconds in (0.0, inf, nan)),
        *(("min_engines", 0), ("max_engines", 0)),
    ],
)
def test_numbers_that_are_not_allowed_are_named(name, value):
    with pytest.raises(ParameterError, match=f"^{name}={value} is not allowed: it must be ") as caught:
        ImageQueue(FakeEngine, "fake", LIMITS, **{name: value})
    assert (caught.value.name, str(pickle.loads(pickle.dumps(caught.value)))) == (name, str(caught.value))


def test_progress(pool, clock):
    with serving(batch_wait=0) as server:
        assert server.queue.progress() == Progress()
        blocking = block(server, pool)
        behind = [pool.submit(ask, server, seed, steps=40) for seed in range(2)]
        wait_for_queue(server, 2)
        progress = server.queue.progress()
        assert (progress.running, progress.waiting, progress.step, progress.steps) == (1, 2, 0, 1)
        server.engine.clock, server.engine.step_seconds, server.engine.pause_at = clock, 0.25, 20
        server.engine.gate.set()
        until(lambda: server.queue.progress().step == 20)
        assert server.queue.progress() == Progress(running=2, waiting=0, step=20, steps=40, seconds=5.0)
        server.engine.pause_at = None
        server.engine.gate.set()
        assert [one.result().status_code for one in (blocking, *behind)] == 3 * [200]
        until(lambda: server.queue.progress() == Progress())


def test_seconds_of_an_image_do_not_include_the_queue(pool, clock):
    with serving(batch_wait=0) as server:
        blocking = block(server, pool)
        with server.http.stream("POST", OPENAI, json={"prompt": "fox", "stream": True, "steps": 3}) as answer:
            events = (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: "))
            assert next(events)["position"] == 1
            clock.now += 1000
            server.engine.clock, server.engine.step_seconds = clock, 0.5
            server.engine.gate.set()
            *_, completed = events
        assert completed["seconds"] == 1.5 and completed["step_seconds"] == [0.5, 0.5, 0.5]
        assert blocking.result().status_code == 200


def test_stuck_call_is_unhealthy(pool, clock):
    with serving(stuck_seconds=600, batch_wait=0) as server:
        blocking = block(server, pool)
        clock.now += 600
        assert server.pool.unhealthy_reason is None
        clock.now += 1
        assert server.pool.unhealthy_reason == "one pipeline call has been running for 601 s"
        server.engine.gate.set()
        assert blocking.result().status_code == 200
        until(lambda: server.pool.unhealthy_reason is None)


def test_failures_of_the_model_in_a_row_are_unhealthy():
    class Broken(FakeEngine):
        is_broken = True

        def generate(self, jobs, should_stop):
            if self.is_broken:
                raise RuntimeError("secret reason")
            return super().generate(jobs, should_stop)

    with serving(Broken()) as server:
        for failures in range(5):
            assert server.pool.unhealthy_reason is None, failures
            assert ask(server).status_code == 500
        until(lambda: server.pool.unhealthy_reason == "the last 5 images failed")
        server.engine.is_broken = False
        assert ask(server).status_code == 200
        until(lambda: server.pool.unhealthy_reason is None)


def test_failures_that_requests_cause_are_healthy():
    """The model still generates a plain image, so another process would fail on the same requests."""
    with serving() as server:
        for _ in range(6):
            assert ask(server, prompt="explode").json()["error"]["code"] == "generation_failed"
        assert server.pool.unhealthy_reason is None and server.http.get("/health").status_code == 200
        assert server.count("images_total", outcome="failed") == 6
        until(lambda: len(server.engine.calls) == 12)
        check = server.engine.calls[-1][0]
        assert (check.prompt, check.width, check.height, check.ratio, check.steps) == ("", 64, 48, 0.5, 2)


def test_timeout_is_504_and_frees_the_engine(pool):
    with serving(config=AppConfig(request_seconds=1.0, steps=2)) as server:
        blocking = block(server, pool)
        behind, stream = pool.submit(ask, server), pool.submit(ask, server, stream=True)
        assert blocking.result().status_code == behind.result().status_code == 504
        assert behind.result().json()["error"]["code"] == "timeout"
        assert events_of(stream.result())[-1]["error"]["code"] == "timeout"
        until(lambda: server.queue.is_idle)
        assert server.count("images_total", outcome="abandoned") == 3
        server.engine.gate.set()
        assert ask(server).status_code == 200


def send_and_keep_open(server, body=b'{"prompt": "fox", "steps": 50}'):
    client = server.connect()
    head = (
        f"POST {OPENAI} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    client.sendall(head.encode() + body)
    return client


def test_disconnection_while_waiting_frees_the_place(pool):
    with serving(capacity=3) as server:
        blocking = block(server, pool)
        clients = [send_and_keep_open(server) for _ in range(3)]
        wait_for_queue(server, 3)
        assert ask(server).status_code == 429
        for client in clients:
            client.close()
        wait_for_queue(server, 0)
        server.engine.gate.set()
        assert blocking.result().status_code == 200 and ask(server).status_code == 200
        assert len(server.engine.calls) == 2, "the three never ran"
        until(lambda: server.requests(499) == 3)
        assert server.count("images_total", outcome="abandoned") == 3


@pytest.mark.parametrize("how", ["close", "reset", "stream"])
def test_disconnection_while_running_stops_the_call(how):
    with serving(FakeEngine(0.05)) as server:
        stream = b"true" if how == "stream" else b"false"
        client = send_and_keep_open(server, b'{"prompt": "fox", "steps": 50, "stream": %s}' % stream)
        assert server.engine.started.acquire(timeout=60)
        if how == "stream":
            until(lambda: b"image_generation.progress" in client.recv(4096))
        if how == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.close()
        until(lambda: server.queue.is_idle)
        assert server.engine.steps_done < 40, "of 50 steps"
        until(lambda: server.requests(200 if how == "stream" else 499) == 1)
        assert server.count("images_total", outcome="abandoned") == 1


def test_batch_continues_for_remaining_clients(pool):
    with serving() as server:
        blocking = block(server, pool)
        stays = pool.submit(ask, server, 1, steps=50)
        wait_for_queue(server, 1)
        leaves = send_and_keep_open(server)
        wait_for_queue(server, 2)
        server.engine.step_seconds = 0.01
        server.engine.gate.set()
        assert blocking.result().status_code == 200
        assert server.engine.started.acquire(timeout=60)
        server.engine.gate.clear()
        leaves.close()
        until(lambda: server.requests(499) == 1)
        server.engine.gate.set()
        assert stays.result().status_code == 200 and len(server.engine.calls[1]) == 2
        assert server.engine.steps_done == 51
        assert server.count("images_total", outcome="abandoned") == 1


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [("explode", "the pipeline failed; the server's log has the reason"), ("damaged", "values that are not finite")],
)
def test_failed_job_does_not_fail_its_batch(pool, prompt, reason):
    with serving() as server:
        blocking = block(server, pool)
        requests = [pool.submit(ask, server, seed, prompt=text) for seed, text in enumerate(("fox", prompt, "owl"))]
        wait_for_queue(server, 3)
        server.engine.gate.set()
        assert [one.result().status_code for one in (blocking, *requests)] == [200, 200, 500, 200]
        assert reason in requests[1].result().json()["error"]["message"]
        calls = [jobs for jobs in server.engine.calls if jobs[0].prompt]  # the empty one checks the engine
        assert [len(jobs) for jobs in calls] == [1, 3, 1, 1, 1]
        assert server.count("images_total", outcome="failed") == 1


def test_other_images_of_a_failed_request_are_abandoned():
    with serving(FakeEngine(0.01), max_batch=1) as server:
        assert ask(server, 7, n=3, steps=20, prompt="explode at seed 7").status_code == 500
        until(lambda: server.queue.is_idle)
        assert server.count("images_total", outcome="failed") == 1
        assert server.count("images_total", outcome="abandoned") == 2


def test_loading_is_503():
    engine, may_load = FakeEngine(), threading.Event()

    def load():
        assert may_load.wait(20)
        return engine

    with serving(engine, load=load) as server:
        for path in ("/ready", OPENAI):
            answer = server.http.get(path) if path == "/ready" else ask(server)
            assert answer.status_code == 503 and answer.headers["retry-after"] == "5"
        assert server.http.get("/health").status_code == 200
        # The sampler is not known yet: none is listed, and none is refused.
        assert server.http.get("/sdapi/v1/samplers").json() == []
        sampler = server.post(TEXT, {"prompt": "fox", "sampler_name": "DDIM"})
        assert sampler.status_code == 503 and sampler.headers["retry-after"] == "5"
        may_load.set()
        until(lambda: server.http.get("/ready").status_code == 200)
        assert ask(server).status_code == 200
        assert server.post(TEXT, {"prompt": "fox", "sampler_name": "DDIM"}).status_code == 200
        assert [one["name"] for one in server.http.get("/sdapi/v1/samplers").json()] == ["DDIM"]


def test_dead_thread_fails_all_requests_and_ends_the_server(pool):
    class Dying(FakeEngine):
        def generate(self, jobs, should_stop=None):
            super().generate(jobs, should_stop)
            raise SystemExit

    with serving(Dying()) as server:
        blocking = block(server, pool)
        behind = pool.submit(ask, server, 1)
        wait_for_queue(server, 1)
        server.engine.gate.set()
        assert blocking.result().status_code == behind.result().status_code == 500
        until(lambda: server.server.should_exit)


def test_draining_finishes_accepted_requests_and_refuses_others(pool):
    with serving() as server:
        blocking = block(server, pool)
        behind = pool.submit(ask, server, 1)
        wait_for_queue(server, 1)
        server.server.handle_exit(15, None)
        until(lambda: server.pool.state == "draining")
        for answer in (ask(server, 2), server.http.get("/ready"), server.post(TEXT, {})):
            assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
        assert server.http.get("/health").status_code == 200
        server.engine.gate.set()
        assert blocking.result().status_code == behind.result().status_code == 200
        until(lambda: server.server.should_exit)
        server.thread.join()
        with pytest.raises(httpx.TransportError):
            ask(server)


def test_second_signal_abandons_all_requests(pool):
    with serving() as server:
        block(server, pool)
        server.server.handle_exit(15, None)
        server.server.handle_exit(15, None)
        assert server.server.should_exit and server.server.force_exit


def test_counts_agree_and_all_places_are_free_after_many_requests(pool):
    """200 requests, half of which disconnect at once."""
    with serving(FakeEngine(0.001), capacity=8) as server:

        def one(index):
            if index % 2:
                return ask(
                    server, index, steps=1 + index % 3, prompt="explode" if index % 7 == 0 else "fox"
                ).status_code
            send_and_keep_open(server).close()
            return None

        statuses = list(pool.map(one, range(200)))
        until(lambda: sum(map(server.requests, (200, 429, 499, 500))) == 200)
        until(lambda: server.queue.is_idle)
        for status in (200, 429, 500):
            assert server.requests(status) >= statuses.count(status)
        assert server.requests(499) > 0 and set(statuses) <= {None, 200, 429, 500}
        outcomes = [server.count("images_total", outcome=name) for name in ("generated", "abandoned", "failed")]
        assert sum(outcomes) == 200 - server.requests(429)
        assert ask(server).status_code == 200


# Programs that are loaded while no image waits


def test_images_come_before_programs(pool):
    engine = FakeEngine()
    first, second = engine.programs = [threading.Event(), threading.Event()]
    with serving(engine) as server:  # which is ready
        request = pool.submit(ask, server)
        wait_for_queue(server, 1)  # while the first program is loaded
        first.set()
        assert request.result().status_code == 200
        assert engine.programs == [second]
        second.set()
        until(lambda: not engine.programs)
        assert ask(server).status_code == 200


def test_a_program_that_cannot_be_loaded_ends_the_server():
    class DamagedEngine(FakeEngine):
        def load_next(self):
            raise ToMeConfigError("unet_64x64.onnx is damaged")

    with serving(DamagedEngine(), load=DamagedEngine) as server:
        until(lambda: server.pool.state == "failed")
        assert "is damaged" in str(server.pool.failure)


# Several engines, which may be lost


class MortalEngine(FakeEngine):
    """Is lost with each job whose prompt says so, and when its attribute is set."""

    is_lost = False

    def generate(self, jobs, should_stop=None):
        if self.is_lost or any(job.prompt == "die" for job in jobs):
            raise EngineLostError("its process has ended")
        return super().generate(jobs, should_stop)

    def count_tokens(self, prompt):
        if self.is_lost:
            raise EngineLostError("its process has ended")
        return super().count_tokens(prompt)


@contextmanager
def serving_engines(number, **options):
    """A server with engines that are made as needed; yields it and the list of all engines so far."""
    made = []

    def load():
        made.append(MortalEngine())
        return made[-1]

    with serving(load=load, min_engines=number, **{"max_engines": number, **options}) as server:
        until(lambda: len(made) == number and server.pool.state == "ready")
        yield server, made


def test_engines_run_at_the_same_time(pool):
    with serving_engines(2, batch_wait=0) as (server, engines):
        for engine in engines:
            engine.gate.clear()
        requests = [pool.submit(ask, server, seed, steps=10 + seed) for seed in range(3)]
        until(lambda: server.queue.progress().running == 2 and server.queue.progress().waiting == 1)
        engines[0].gate.set()  # it takes the third one too
        until(lambda: sum(one.done() for one in requests) == 2)
        until(lambda: server.queue.progress().running == 1)
        assert not server.queue.is_idle
        engines[1].gate.set()
        assert [one.result().status_code for one in requests] == 3 * [200]
        assert [len(engine.calls) for engine in engines] == [2, 1]


def test_jobs_of_a_lost_engine_are_repeated_by_others(pool):
    with serving_engines(2) as (server, engines):
        engines[0].is_lost = True
        assert [ask(server, seed, n=3).status_code for seed in range(6)] == 6 * [200]
        until(lambda: len(engines) == 3)  # it was replaced
        assert server.count("images_total", outcome="generated") == 18
        assert server.count("images_total", outcome="failed") == 0
        assert server.http.get("/health").status_code == 200


def test_job_with_which_engines_are_lost_fails_alone(pool):
    with serving_engines(1, batch_wait=0.5) as (server, engines):
        requests = [pool.submit(ask, server, seed, prompt=text) for seed, text in enumerate(("fox", "die", "owl"))]
        assert [one.result().status_code for one in requests] == [200, 500, 200]
        assert "3 engines died with this job" in requests[1].result().text and len(engines) == 4
        assert server.count("images_total", outcome="failed") == 1


def test_engines_follow_the_load(pool, monkeypatch):
    monkeypatch.setattr(pool_module, "SCALE_UP_SECONDS", 0.2)
    monkeypatch.setattr(pool_module, "SCALE_DOWN_SECONDS", 0.3)
    with serving_engines(1, max_engines=2, batch_wait=0) as (server, engines):
        engines[0].gate.clear()
        requests = [pool.submit(ask, server, seed, steps=10 + seed) for seed in range(2)]
        until(lambda: len(engines) == 2)
        engines[0].gate.set()
        assert [one.result().status_code for one in requests] == 2 * [200]
        until(lambda: server.pool._engines == engines[:1])  # the second one was given up
        engines[0].gate.clear()
        requests = [pool.submit(ask, server, seed, steps=10 + seed) for seed in range(2)]
        until(lambda: len(engines) == 3)
        engines[0].gate.set()
        assert [one.result().status_code for one in requests] == 2 * [200]


def test_an_engine_that_loads_is_help_for_an_image_that_waits(pool, monkeypatch):
    """One late image loads one engine, and those that it leaves behind load the next."""
    monkeypatch.setattr(pool_module, "SCALE_UP_SECONDS", 0.05)
    may_load, made = [threading.Event() for _ in range(4)], []
    may_load[0].set()

    def load():
        made.append(MortalEngine())
        engine, number = made[-1], len(made) - 1
        engine.gate.clear()
        assert may_load[number].wait(60)
        return engine

    with serving(load=load, max_engines=4, batch_wait=0) as server:
        until(lambda: server.pool.state == "ready")
        requests = [pool.submit(ask, server, seed, steps=10 + seed) for seed in range(2)]
        until(lambda: len(made) == 2)
        sleep(1.5)  # spare threads look once a second
        assert len(made) == 2, "the engine that loads will take the image"
        may_load[1].set()
        until(lambda: server.queue.progress().running == 2)
        sleep(1.5)
        assert len(made) == 2, "no image waits"
        requests += [pool.submit(ask, server, seed, steps=10 + seed) for seed in range(2, 5)]
        until(lambda: len(made) == 3)
        may_load[2].set()
        until(lambda: len(made) == 4)  # images still wait
        may_load[3].set()
        for engine in made:
            engine.gate.set()
        assert [one.result().status_code for one in requests] == 5 * [200]


def test_an_image_that_waits_for_its_batch_loads_no_engine(pool, monkeypatch):
    monkeypatch.setattr(pool_module, "SCALE_UP_SECONDS", 0.05)
    with serving_engines(1, max_engines=2, batch_wait=2.5) as (server, engines):
        assert ask(server).status_code == 200 and len(engines) == 1


def test_replacement_that_does_not_load_leaves_the_other_engines(pool):
    with serving_engines(2) as (server, engines):
        server.pool._load = lambda: 1 / 0
        engines[0].is_lost = True
        assert [ask(server, seed).status_code for seed in range(6)] == 6 * [200]
        engines[1].is_lost = True
        assert ask(server).status_code == 500
        until(lambda: server.server.should_exit)


def count(server):
    return server.post("/v1/tokens", {"prompt": "a red fox"})


def test_tokens_are_counted_by_an_engine_that_lives():
    with serving_engines(2) as (server, engines):
        assert count(server).json()["tokens"] == 5
        engines[0].is_lost = True
        assert count(server).json()["tokens"] == 5, "by the other engine"
        until(lambda: len(engines) == 3)  # it was replaced, though no image has met it
        assert count(server).status_code == ask(server).status_code == 200


def test_tokens_are_503_until_the_only_engine_is_replaced():
    may_load, made = threading.Event(), []

    def load():
        assert not made or may_load.wait(20)
        made.append(MortalEngine())
        return made[-1]

    with serving(load=load) as server:
        until(lambda: server.pool.state == "ready")
        made[0].is_lost = True
        for _ in range(2):
            refused = count(server)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            assert refused.json()["error"]["code"] == "unavailable"
        may_load.set()
        until(lambda: count(server).status_code == 200)
        assert len(made) == 2 and ask(server).status_code == 200


def test_what_engines_have_in_common_outlives_the_first():
    with serving_engines(1) as (server, engines):
        engines[0].is_lost = True
        assert ask(server, n=2).status_code == 200
        assert server.queue.sampler == "DDIM" and server.queue.methods == FakeEngine.methods
        assert [len(jobs) for jobs in engines[1].calls] == [1, 1], "jobs of a lost engine run alone"
        assert ask(server, n=2).status_code == 200 and len(engines[1].calls[-1]) == 2


@pytest.mark.parametrize("number", [1, 2])
def test_a_model_that_cannot_be_loaded_ends_a_server_that_could_have_more_engines(number):
    tried = []

    def load():
        tried.append(True)
        raise ToMeConfigError("no such model")

    with serving(load=load, min_engines=number, max_engines=4) as server:
        until(lambda: server.pool.state == "failed")
        assert "no such model" in str(server.pool.failure) and len(tried) == number
        until(lambda: server.server.should_exit)


def test_a_spare_thread_takes_over_from_one_that_cannot_replace_its_engine(pool):
    made = []

    def load():
        if len(made) == 1:
            made.append(None)
            raise ToMeConfigError("no room for this engine")
        made.append(MortalEngine())
        return made[-1]

    with serving(load=load, max_engines=2) as server:
        until(lambda: server.pool.state == "ready")
        made[0].is_lost = True
        assert ask(server).status_code == 200
        assert len(made) == 3 and server.http.get("/health").status_code == 200


def test_engines_that_no_thread_can_replace_end_the_server(pool):
    """Waiting images fail with it. A request that comes when it closes its connections has no answer."""
    tried = []

    def load():
        tried.append(MortalEngine())
        if len(tried) > 1:
            raise ToMeConfigError("no room for this engine")
        return tried[0]

    with serving(load=load, max_engines=3) as server:
        until(lambda: server.pool.state == "ready")
        tried[0].is_lost = True
        requests = [pool.submit(ask, server, seed) for seed in range(2)]
        errors = [one.exception() for one in requests]
        statuses = {one.result().status_code for one, error in zip(requests, errors, strict=True) if error is None}
        assert statuses in ({500}, {500, 503})
        assert all(error is None or isinstance(error, httpx.TransportError) for error in errors)
        until(lambda: server.server.should_exit)
        assert server.pool.state == "failed" and len(tried) == 4, "the first one, and one try of each thread"


def test_the_last_engine_is_not_given_up(monkeypatch):
    """Not even one that was loaded because of the load, after those that were not have ended."""
    monkeypatch.setattr(pool_module, "SCALE_DOWN_SECONDS", 0.01)
    made, idle = [], []

    def next_call(queue, engine, seconds, original=ImageQueue._next_call):
        if (call := original(queue, engine, seconds)) is None and seconds == 0.01:
            idle.append(engine)
        return call

    monkeypatch.setattr(ImageQueue, "_next_call", next_call)

    def load():
        if made:
            made.append(FakeEngine())
            return made[-1]
        made.append(None)
        raise ToMeConfigError("no room for this engine")

    with serving(load=load, min_engines=2, max_engines=3) as server:
        until(lambda: idle.count(made[-1]) >= 5)  # that of the spare thread
        assert len(made) == 3 and ask(server).status_code == 200


def test_a_lost_engine_is_no_failure_of_the_model():
    class DiesLater(MortalEngine):
        def generate(self, jobs, should_stop=None):
            if len(self.calls) == 1:  # the check of the model, after the job that has failed
                raise EngineLostError("its process has ended")
            return super().generate(jobs, should_stop)

    made = []

    def load():
        made.append(DiesLater())
        return made[-1]

    with serving(load=load) as server:
        until(lambda: server.pool.state == "ready")
        assert ask(server, prompt="explode").status_code == 500
        until(lambda: len(made) == 2)
        assert server.pool._failures == 0


def test_jobs_of_an_engine_that_cannot_batch_run_alone():
    class Alone(FakeEngine):
        can_batch = False

    with serving(Alone(), batch_wait=60) as server:
        assert ask(server, n=3).status_code == 200
        assert [len(jobs) for jobs in server.engine.calls] == [1, 1, 1]


def test_a_call_that_stops_unasked_is_answered():
    class Stopping(FakeEngine):
        def generate(self, jobs, should_stop=None):
            raise AbandonedError("stopped")

    with serving(Stopping()) as server:
        assert ask(server, n=2).status_code == 500
