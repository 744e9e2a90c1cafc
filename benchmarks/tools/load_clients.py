"""The clients of load.py, and their checks of the answers."""

import base64
import contextlib
import io
import json
import random
import socket
import threading
import time
from collections import Counter

import httpx
from PIL import Image

DRAWING = ("openai", "txt2img", "img2img")
# Endpoints whose answers the clients do not count, because the clients that use them read none.
UNCOUNTED = ('endpoint="other"', 'endpoint="/openapi.json"')
KINDS = {"openai": 5, "txt2img": 3, "img2img": 1, "invalid": 4, "abandon": 4, "look": 1}  # with their weights
OPENAI, TEXT, IMAGE = "/v1/images/generations", "/sdapi/v1/txt2img", "/sdapi/v1/img2img"


def png(width: int, height: int) -> str:
    """A gradient, in base64."""
    file = io.BytesIO()
    Image.linear_gradient("L").resize((width, height)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


NOT_JSON = (400, 422)
WITH_IMAGE = (422, 429)  # an image is decoded after its job has a place
INVALID = [  # path, JSON or bytes, expected statuses
    (OPENAI, {"prompt": "fox", "n": 0}, (422,)),
    (OPENAI, {"prompt": "fox", "size": "7x7"}, (422,)),
    (OPENAI, {"prompt": 5}, (422,)),
    (OPENAI, {"prompt": "fox", "seed": -1}, (422,)),
    (OPENAI, {"prompt": "fox", "colour": "red"}, (422,)),
    (OPENAI, {"prompt": "fox", "model": "../../etc/passwd"}, (404,)),
    (OPENAI, {"prompt": "x" * 3000}, (422,)),
    (OPENAI, b'{"prompt": "fox", "guidance_scale": NaN}', NOT_JSON),
    (OPENAI, b"{", NOT_JSON),
    (OPENAI, b"[" * 50_000, (400, 413)),
    (OPENAI, b" " * 1_100_000, (413,)),
    (TEXT, {"enable_hr": True, "hr_scale": 3}, (422,)),
    (TEXT, {"sampler_name": "no such sampler"}, (422,)),
    (TEXT, b'{"prompt": "fox", "batch_size": %s}' % (3000 * b"9"), NOT_JSON),
    (TEXT, b'{"prompt": "%s"}' % (900_000 * b"x"), (422,)),
    (IMAGE, {"init_images": ["/etc/passwd"]}, WITH_IMAGE),
    (IMAGE, {"init_images": [base64.b64encode(b"\x80\x04}.").decode()]}, WITH_IMAGE),
    (IMAGE, {"init_images": [png(1, 2**22)], "width": 64, "height": 64}, WITH_IMAGE),
    (IMAGE, {"init_images": 300_000 * [0]}, (413, 422)),
]


class Load:
    """The state that all clients share: the server's URL, their answers, and wrong answers."""

    def __init__(self, url: str, sizes: list[str], ratios: list[float]) -> None:
        self.url, self.sizes, self.ratios = url, sizes, ratios
        self.lock = threading.Lock()  # guards the counts
        self.answers: Counter = Counter()  # (kind, status)
        self.abandoned = 0
        self.seconds: dict[str, list[float]] = {}  # response times by kind: with images, and of invalid requests
        self.wrong: list[str] = []
        self.start = png(96, 96)

    def note(self, kind: str, status: int, seconds: float, problem: str | None) -> None:
        with self.lock:
            self.answers[kind, status] += 1
            if status == 200 or kind == "invalid":
                self.seconds.setdefault(kind, []).append(seconds)
            if problem:
                self.wrong.append(f"{kind}: {problem}")

    def client(self, seed: int, end: float) -> None:
        """One client: requests of all kinds, one after the other, until the end."""
        rng = random.Random(seed)
        # Shorter than the server's time limit, or it might close a connection at the moment of the next request.
        with httpx.Client(base_url=self.url, timeout=120, limits=httpx.Limits(keepalive_expiry=2)) as http:
            while time.monotonic() < end:
                kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
                try:
                    if kind == "abandon":
                        self.abandon(rng)
                    elif kind == "invalid":
                        self.send_invalid(http, rng)
                    elif kind == "look":
                        path = rng.choice(("/health", "/ready", "/v1/models", "/metrics"))
                        self.check(path, http.get(path), (200,))
                    else:
                        self.draw(http, kind, rng)
                except Exception as error:
                    self.wrong.append(f"{kind}: no answer: {error!r}")

    def check(self, kind: str, answer: httpx.Response, statuses: tuple[int, ...]) -> None:
        problem = f"{answer.status_code} instead of {statuses}: {answer.text[:200]}"
        problem = None if answer.status_code in statuses else problem
        self.note(kind, answer.status_code, answer.elapsed.total_seconds(), problem)

    def send_invalid(self, http: httpx.Client, rng: random.Random) -> None:
        path, body, statuses = rng.choice(INVALID)
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        self.check("invalid", http.post(path, headers={"Content-Type": "application/json"}, **content), statuses)

    def draw(self, http: httpx.Client, kind: str, rng: random.Random) -> None:
        path, body = self.request(kind, rng)
        data = json.dumps(body).encode()
        content = rng.choice((data, iter([data[:100], data[100:]])))  # with a Content-Length, or in chunks
        answer = http.post(path, content=content, headers={"Content-Type": "application/json"})
        problem = None
        if answer.status_code == 200:
            problem = self.compare(kind, body, answer.json())
        elif answer.status_code != 429 or int(answer.headers.get("retry-after", 0)) < 1:
            problem = f"{answer.status_code}: {answer.text[:200]}"
        self.note(kind, answer.status_code, answer.elapsed.total_seconds(), problem)
        if answer.status_code == 429:
            time.sleep(rng.uniform(0.1, 1))  # less than Retry-After, to keep the queue full

    def request(self, kind: str, rng: random.Random) -> tuple[str, dict]:
        """A valid request with few steps, so that many fit into the time."""
        size, images = rng.choice(self.sizes), rng.choice((1, 1, 2))
        width, height = map(int, size.split("x"))
        common = {"prompt": "a 3d render of fox", "seed": rng.randrange(2**32 - 3), "steps": rng.choice((1, 2, 2, 4))}
        if kind == "openai":
            fields = {"guidance_scale": 2.0, "tome_ratio": rng.choice(self.ratios)}
            return OPENAI, {**common, "size": size, "n": images, **fields}
        body = {**common, "width": width, "height": height, "batch_size": images, "cfg_scale": 2.0}
        if kind == "img2img":
            return IMAGE, {**body, "steps": 4, "denoising_strength": 0.5, "init_images": [self.start]}
        return TEXT, body

    def compare(self, kind: str, body: dict, answer: dict) -> str | None:
        """The error in an answer's images, or None."""
        files = [image["b64_json"] for image in answer["data"]] if kind == "openai" else answer["images"]
        for index, encoded in enumerate(files):
            image = Image.open(io.BytesIO(base64.b64decode(encoded)))
            image.load()
            metadata = json.loads(image.text["ppdiffusers_tome"])
            size = body.get("size") or f"{body['width']}x{body['height']}"
            actual = (f"{image.width}x{image.height}", metadata["seed"], metadata["steps"])
            if actual != (size, body["seed"] + index, body["steps"]):
                return f"{actual} for {body}"
        return None if len(files) == body.get("n", body.get("batch_size")) else f"{len(files)} images for {body}"

    def connect(self) -> socket.socket:
        """A connection without a request."""
        host, port = self.url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=30)

    def idle(self, end: float, connections: int = 600) -> None:
        """Keep more connections open than the server accepts, half of them with an incomplete head, until the end."""
        while time.monotonic() < end:
            try:
                with contextlib.ExitStack() as clients:
                    for index in range(connections):
                        client = clients.enter_context(self.connect())
                        if index % 2:
                            client.sendall(b"POST /v1/images/gen")
                    time.sleep(3)
            except ConnectionError:  # the server may close any of them
                pass
            except OSError as error:
                self.wrong.append(f"idle: the server accepts no connection: {error!r}")

    def read_nothing(self, end: float) -> None:
        """Send 40,000 requests at once and read no answer, until the server closes the connection or the end."""
        while time.monotonic() < end:
            with contextlib.suppress(ConnectionError, TimeoutError), self.connect() as client:
                client.sendall(40_000 * b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
                while time.monotonic() < end:
                    client.sendall(b"\r\n")  # fails once the server has closed the connection
                    time.sleep(1)
            time.sleep(0.1)

    def send_garbage(self, end: float) -> None:
        """Send malformed heads; the server answers with a 4xx and closes the connection."""
        head = b"POST /openapi.json HTTP/1.1\r\nHost: localhost\r\n"
        garbage = (b"\x16\x03\x01\r\n\r\n", head + b"Content-Length: -1\r\n\r\n")
        while time.monotonic() < end:
            for data in garbage:
                with self.connect() as client, contextlib.suppress(ConnectionError):
                    client.sendall(data)
                    answer = client.recv(4096)
                    if not answer.startswith(b"HTTP/1.1 4"):
                        self.wrong.append(f"garbage: {answer[:200]!r} for {data[:100]!r}")
            time.sleep(0.5)

    def abandon(self, rng: random.Random) -> None:
        """Disconnect in the middle of the body, while waiting, or while the pipeline runs."""
        path, body = self.request(rng.choice(("openai", "txt2img")), rng)
        data = json.dumps({**body, "steps": 50}).encode()
        sent = data[: rng.choice((len(data) // 2, len(data), len(data)))]
        with self.connect() as client:
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            head += f"Content-Length: {len(data)}\r\n\r\n"
            client.sendall(head.encode() + sent)
            time.sleep(rng.choice((0, rng.uniform(0, 0.3), rng.uniform(0, 3))))
        with self.lock:
            self.abandoned += 1
