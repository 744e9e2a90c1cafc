"""Every request gets an answer while others wait, fail or leave: 429, 500, 503 and 504, also during the shutdown."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from serving_support import IMAGE, OPENAI, TEXT, FakeEngine, events_of, serving, until

from ppdiffusers_tome.serving.app_config import AppConfig
from ppdiffusers_tome.serving.jobs import EngineLostError


def ask(server, seed=0, **changes):
    return server.post(OPENAI, {"prompt": "fox", "seed": seed, **changes})


@pytest.fixture
def clients():
    with ThreadPoolExecutor(16) as executor:
        yield executor


def block(server, clients, seed=99):
    """Send one request that stays in the engine; returns its future."""
    server.engine.gate.clear()
    blocking = clients.submit(ask, server, seed, steps=1)
    assert server.engine.started.acquire(timeout=60)
    return blocking


def wait_for_queue(server, images):
    until(lambda: server.count("waiting_images") == images)


def test_requests_share_a_call_and_get_their_own_images(clients):
    with serving() as server:
        blocking = block(server, clients)
        requests = [clients.submit(ask, server, seed) for seed in range(3)]
        wait_for_queue(server, 3)
        server.engine.gate.set()
        assert [one.result().status_code for one in (blocking, *requests)] == 4 * [200]
        assert [len(jobs) for jobs in server.engine.calls] == [1, 3]
        assert [one.result().json()["data"][0]["seed"] for one in requests] == [0, 1, 2]
        assert server.count("batch_images_sum") == 4 and server.count("images_total", outcome="generated") == 4


def test_full_queue_answers_429_at_once(clients):
    with serving(capacity=3) as server:
        blocking = block(server, clients)
        accepted = [clients.submit(ask, server, seed) for seed in range(3)]
        wait_for_queue(server, 3)
        refused = ask(server)
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "queue_full"
        assert refused.headers["retry-after"] == "5"
        answer = server.post(TEXT, {"prompt": "fox"})
        assert answer.status_code == 429 and "detail" in answer.json() and answer.headers["retry-after"] == "5"
        answer = ask(server, stream=True)
        assert answer.status_code == 429 and answer.headers["retry-after"] == "5"
        assert server.post(IMAGE, {"init_images": ["broken"]}).status_code == 429, "it is decoded when it has a place"
        assert server.http.get("/ready").status_code == 200, "a full queue is ready"
        server.engine.gate.set()
        assert [one.result().status_code for one in (blocking, *accepted)] == 4 * [200]
        assert ask(server).status_code == 200 and server.post(IMAGE, {"init_images": ["broken"]}).status_code == 422


def test_timeout_is_504_and_frees_the_engine(clients):
    with serving(config=AppConfig(request_seconds=0.3, steps=2)) as server:
        blocking = block(server, clients)
        behind, stream = clients.submit(ask, server), clients.submit(ask, server, stream=True)
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


def test_disconnection_while_waiting_frees_the_place(clients):
    with serving(capacity=3) as server:
        blocking = block(server, clients)
        connections = [send_and_keep_open(server) for _ in range(3)]
        wait_for_queue(server, 3)
        assert ask(server).status_code == 429
        for connection in connections:
            connection.close()
        wait_for_queue(server, 0)
        server.engine.gate.set()
        assert blocking.result().status_code == 200 and ask(server).status_code == 200
        assert len(server.engine.calls) == 2, "the three never ran"
        until(lambda: server.requests(499) == 3)


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


def test_batch_continues_for_remaining_clients(clients):
    with serving() as server:
        blocking = block(server, clients)
        stays = clients.submit(ask, server, 1, steps=50)
        wait_for_queue(server, 1)
        leaves = send_and_keep_open(server)
        wait_for_queue(server, 2)
        server.engine.pause_at = 10
        server.engine.gate.set()
        assert blocking.result().status_code == 200
        assert server.engine.started.acquire(timeout=60)
        leaves.close()
        until(lambda: server.requests(499) == 1)
        server.engine.pause_at = None
        server.engine.gate.set()
        assert stays.result().status_code == 200 and len(server.engine.calls[1]) == 2
        assert server.engine.steps_done == 51


def test_interrupt_and_skip_end_no_request_of_openais_clients(clients):
    with serving() as server:
        blocking = block(server, clients)
        behind = clients.submit(ask, server, 1)
        wait_for_queue(server, 1)
        for path in ("skip", "interrupt"):
            webui = clients.submit(server.post, TEXT, {"prompt": "fox"})
            wait_for_queue(server, 2)
            assert server.http.post(f"/sdapi/v1/{path}").status_code == 200
            assert webui.result(30).status_code == 409
        assert not blocking.done() and not behind.done()
        server.engine.gate.set()
        assert blocking.result().status_code == behind.result().status_code == 200


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [("explode", "the pipeline failed; the server's log has the reason"), ("damaged", "values that are not finite")],
)
def test_failed_job_does_not_fail_its_batch(clients, prompt, reason):
    with serving() as server:
        blocking = block(server, clients)
        requests = [clients.submit(ask, server, seed, prompt=text) for seed, text in enumerate(("fox", prompt, "owl"))]
        wait_for_queue(server, 3)
        server.engine.gate.set()
        assert [one.result().status_code for one in (blocking, *requests)] == [200, 200, 500, 200]
        assert reason in requests[1].result().json()["error"]["message"]
        calls = [jobs for jobs in server.engine.calls if jobs[0].prompt]  # the empty one checks the engine
        assert [len(jobs) for jobs in calls] == [1, 3, 1, 1, 1]


def test_loading_is_503():
    engine, may_load = FakeEngine(), threading.Event()

    def load():
        assert may_load.wait(20)
        return engine

    with serving(engine, load=load) as server:
        for answer in (server.http.get("/ready"), ask(server), server.post(TEXT, {"prompt": "fox"})):
            assert answer.status_code == 503 and answer.headers["retry-after"] == "5"
        tokens = server.post("/v1/tokens", {"prompt": "fox"})
        assert (tokens.status_code, tokens.headers["retry-after"]) == (503, "5")
        assert tokens.json()["error"]["code"] == "unavailable"
        assert server.http.get("/health").status_code == 200
        assert [one["name"] for one in server.http.get("/sdapi/v1/samplers").json()] == ["DDIM"], "known before"
        may_load.set()
        until(lambda: server.http.get("/ready").status_code == 200)
        assert ask(server).status_code == 200


def test_an_engine_that_is_lost_loses_no_request():
    class DiesOnce(FakeEngine):
        def generate(self, jobs, should_stop=None):
            if self is made[0]:
                raise EngineLostError("its process has ended")
            return super().generate(jobs, should_stop)

    made = []

    def load():
        made.append(DiesOnce())
        return made[-1]

    with serving(load=load) as server:
        until(lambda: server.pool.state == "ready")
        assert ask(server, n=2).status_code == 200 and len(made) == 2
        assert [len(jobs) for jobs in made[1].calls] == [1, 1], "jobs of a lost engine run alone"
        assert ask(server, n=2).status_code == 200 and len(made[1].calls[-1]) == 2


def test_dead_thread_fails_all_requests_and_ends_the_server(clients):
    class Dying(FakeEngine):
        def generate(self, jobs, should_stop=None):
            super().generate(jobs, should_stop)
            raise SystemExit

    with serving(Dying()) as server:
        blocking = block(server, clients)
        behind = clients.submit(ask, server, 1)
        wait_for_queue(server, 1)
        server.engine.gate.set()
        assert blocking.result().status_code == behind.result().status_code == 500
        until(lambda: server.server.should_exit)


def test_draining_finishes_accepted_requests_and_refuses_others(clients):
    with serving() as server:
        blocking = block(server, clients)
        behind = clients.submit(ask, server, 1)
        wait_for_queue(server, 1)
        server.server.handle_exit(15, None)
        until(lambda: server.pool.state == "draining")
        for answer in (ask(server, 2), server.http.get("/ready"), server.post(TEXT, {})):
            assert answer.status_code == 503 and answer.headers["retry-after"] == "5"
        assert server.http.get("/health").status_code == 200
        server.engine.gate.set()
        assert blocking.result().status_code == behind.result().status_code == 200
        until(lambda: server.server.should_exit)
        server.thread.join()
        with pytest.raises(httpx.TransportError):
            ask(server)


def test_second_signal_abandons_all_requests(clients):
    with serving() as server:
        requests = [block(server, clients), clients.submit(ask, server, 1)]
        wait_for_queue(server, 1)
        server.server.handle_exit(15, None)
        until(lambda: server.pool.state == "draining")
        assert not any(request.done() for request in requests), "the first signal waits for them"
        server.server.handle_exit(15, None)
        for request in requests:
            with pytest.raises(httpx.TransportError):
                request.result(timeout=60)
        until(lambda: server.queue.is_idle)
        assert server.count("images_total", outcome="abandoned") == 2
        server.thread.join(60)
        assert not server.thread.is_alive() and server.engine.steps_done == 0


def test_counts_agree_and_all_places_are_free_after_many_requests(clients):
    """200 requests, half of which disconnect at once."""
    with serving(FakeEngine(0.001), capacity=8) as server:

        def one(index):
            if index % 2:
                prompt = "explode" if index % 7 == 0 else "fox"
                return ask(server, index, steps=1 + index % 3, prompt=prompt).status_code
            send_and_keep_open(server).close()
            return None

        statuses = list(clients.map(one, range(200)))
        until(lambda: sum(map(server.requests, (200, 429, 499, 500))) == 200)
        until(lambda: server.queue.is_idle)
        for status in (200, 429, 500):
            assert server.requests(status) >= statuses.count(status)
        assert server.requests(499) > 0 and set(statuses) <= {None, 200, 429, 500}
        outcomes = [server.count("images_total", outcome=name) for name in ("generated", "abandoned", "failed")]
        assert sum(outcomes) == 200 - server.requests(429)
        assert ask(server).status_code == 200
