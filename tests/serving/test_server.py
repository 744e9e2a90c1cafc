"""The server ends in time, whatever its clients and its engine do: those that read nothing, stop sending or hang."""

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import uvicorn
from serving_support import OPENAI, read_answer, serving, until
from uvicorn.protocols.http.h11_impl import H11Protocol

from ppdiffusers_tome.serving.app_config import AppConfig
from ppdiffusers_tome.serving.server import _is_about_this_server

ROOT = Path(__file__).parents[2]
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
OPENAPI = HEALTH.replace(b"health", b"openapi.json")  # the longest answer


@pytest.fixture
def log(caplog, monkeypatch):
    """The log of the server and asyncio; every server configures uvicorn's loggers, which then do not propagate."""
    for name in ("uvicorn", "uvicorn.access"):
        monkeypatch.setitem(uvicorn.config.LOGGING_CONFIG["loggers"][name], "propagate", True)
    caplog.set_level(logging.INFO)
    return caplog


@contextmanager
def client_that_reads_nothing(server):
    """A client that sends 40,000 requests and reads no answer, until the server cannot write any more."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", server.port))
    sending = threading.Thread(target=send, args=(client, 40_000 * OPENAPI))
    sending.start()
    connections = server.server.server_state.connections
    until(lambda: any(connection.flow.write_paused for connection in list(connections)))
    with client:
        yield
    sending.join()


def send(client, data):
    with suppress(OSError):
        client.sendall(data)


def is_closed(client):
    client.settimeout(10)
    try:
        while client.recv(4096):
            pass
    except ConnectionError:
        pass
    return True


def test_shutdown_does_not_wait_for_a_client_that_reads_nothing(log):
    with serving(seconds=1) as server, client_that_reads_nothing(server):
        server.server.handle_exit(signal.SIGTERM, None)
        server.thread.join()
        assert not server.server.server_state.connections and not server.server.server_state.tasks
    assert "Shutting down" in log.text and not [record for record in log.records if record.exc_info]


def test_shutdown_waits_for_a_client_that_reads_slowly():
    """The answers exceed the system's buffers, and are complete although the signal came before."""
    with serving(seconds=60) as server, server.connect() as client:
        page = server.http.get("/openapi.json").content
        requests = OPENAPI * (5_000_000 // len(page))
        sending = threading.Thread(target=client.sendall, args=(requests,))
        sending.start()
        enough = 3_800_000 // len(page)
        until(lambda: server.server.server_state.total_requests > enough)
        server.server.handle_exit(signal.SIGTERM, None)
        answer = b""
        while data := client.recv(100_000):
            answer += data
        sending.join()
        assert answer.endswith(page) and answer.count(b"HTTP/1.1 200") > enough


POST = f"POST {OPENAI} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n".encode()


def test_client_that_stops_sending_is_gone():
    """Its end of file is the same for one that still reads, and a disconnection is how jobs are abandoned."""
    with serving() as server, server.connect() as client:
        server.engine.gate.clear()
        body = b'{"prompt": "fox"}'
        client.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert server.engine.started.acquire(timeout=20)
        client.shutdown(socket.SHUT_WR)
        assert client.recv(4096) == b"", "no answer"
        until(lambda: server.count("images_total", outcome="abandoned") == 1 and server.requests(499) == 1)
        server.engine.gate.set()
        assert server.post(OPENAI, {"prompt": "fox"}).status_code == 200


def test_idle_connections_are_closed_after_the_time_of_the_option():
    """By default later than in nginx and in load balancers, which close theirs after 60 s."""
    with serving(config=AppConfig(keep_alive_seconds=0.01)) as server, server.connect() as client:
        client.sendall(HEALTH)
        assert read_answer(client)[0] == 200 and is_closed(client)
    with serving() as server:
        assert server.server.config.timeout_keep_alive == AppConfig.keep_alive_seconds > 60


# Servers in their own process

SERVER = """
import sys, threading
from serving_support import LIMITS, FakeEngine
from ppdiffusers_tome.serving.app import create_app
from ppdiffusers_tome.serving.app_config import AppConfig
from ppdiffusers_tome.serving.image_engine import ServedModel
from ppdiffusers_tome.serving.pool import EnginePool
from ppdiffusers_tome.serving.prometheus import Metrics
from ppdiffusers_tome.serving.queue import JobQueue
from ppdiffusers_tome.serving.server import serve

class Stuck(FakeEngine):
    def generate(self, jobs, should_stop=None):
        if jobs[0].prompt == "stuck":
            threading.Event().wait()
        return super().generate(jobs, should_stop)

metrics = Metrics()
pool = EnginePool(lambda is_unwanted: Stuck(), JobQueue(metrics), metrics)
app = create_app(ServedModel("fake", "DDIM", {}, LIMITS), pool, metrics, AppConfig())
serve(pool, app, port=0, seconds=float(sys.argv[1]))
"""


@contextmanager
def process(tmp_path, seconds):
    """A server in its own process: Popen, URL and log."""
    path = tmp_path / "log"
    paths = os.pathsep.join(map(str, (ROOT / "tests", ROOT)))
    with path.open("w") as output:
        running = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SERVER, str(seconds)],
            stdout=output,
            stderr=output,
            env={**os.environ, "PYTHONPATH": paths},
        )
    try:
        until(lambda: "listening at" in path.read_text() or running.poll() is not None, seconds=100)
        url = re.search(r"listening at (http://\S+)", path.read_text())[1]
        until(lambda: httpx.get(f"{url}/ready", timeout=60).status_code == 200)
        yield running, url, path
    finally:
        running.kill()
        running.wait()


def test_stuck_call_does_not_keep_the_process_alive(tmp_path):
    with process(tmp_path, seconds=1) as (server, url, log):
        request = threading.Thread(target=ask, args=(url,))
        request.start()
        until(lambda: "running_images 1.0" in httpx.get(f"{url}/metrics").text)
        server.send_signal(signal.SIGTERM)
        assert server.wait(120) == 1
        request.join()
        assert "ending the process while the model is running" in log.read_text()


def ask(url):
    with pytest.raises(httpx.HTTPError):
        httpx.post(f"{url}{OPENAI}", json={"prompt": "stuck"}, timeout=60)


def test_answers_are_sent_without_delay():
    with serving() as server:
        server.http.get("/health")
        (connection,) = server.server.server_state.connections
        assert connection.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_uvicorns_advice_about_websockets_is_not_logged(caplog):
    """It names packages to install, and no route has websockets. That a client asked for one is logged."""
    server = logging.getLogger("a server")
    server.addFilter(_is_about_this_server)
    connection = SimpleNamespace(logger=server, _should_upgrade_to_ws=lambda: False)
    H11Protocol._unsupported_upgrade_warning(connection)
    assert caplog.messages == ["Unsupported upgrade request."]
