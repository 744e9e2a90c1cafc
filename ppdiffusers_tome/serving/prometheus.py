"""A server's counters in Prometheus' format. Every server has its own registry."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

PREFIX = "ppdiffusers_tome"
SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)


class Metrics:
    """Counters and gauges of requests, counted by the HTTP side, and of images, counted by the queue.

    Attributes:
        requests: answered requests by endpoint and status; status 499: the client disconnected before the answer.
        request_seconds: from the first byte of a request's body to its answer, by endpoint.
        images: images by outcome: "generated", "failed" (the pipeline raised) or "abandoned" (no client waits).
        batch_images, batch_seconds: images in one pipeline call, and its duration.
        waiting, running: images in the queue and in the pipeline now.
        ready: 1 while jobs are accepted.
        program_loads: programs of the UNet that the first engine has loaded in this process.
    """

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.requests = Counter(
            f"{PREFIX}_requests", "Requests by endpoint and status", ("endpoint", "status"), registry=registry
        )
        self.request_seconds = Histogram(
            f"{PREFIX}_request_seconds", "Seconds to the answer", ("endpoint",), buckets=SECONDS, registry=registry
        )
        self.images = Counter(f"{PREFIX}_images", "Images by outcome", ("outcome",), registry=registry)
        self.batch_images = Histogram(
            f"{PREFIX}_batch_images", "Images in one call", buckets=(1, 2, 3, 4, 6, 8, 12, 16), registry=registry
        )
        self.batch_seconds = Histogram(
            f"{PREFIX}_batch_seconds", "Seconds of one call", buckets=SECONDS, registry=registry
        )
        self.waiting = Gauge(f"{PREFIX}_waiting_images", "Images in the queue", registry=registry)
        self.running = Gauge(f"{PREFIX}_running_images", "Images in the pipeline", registry=registry)
        self.ready = Gauge(f"{PREFIX}_ready", "1 while jobs are accepted", registry=registry)
        self.program_loads = Gauge(f"{PREFIX}_program_loads", "Programs that were loaded", registry=registry)
        for outcome in ("generated", "failed", "abandoned"):
            self.images.labels(outcome)

    def page(self) -> bytes:
        """The text of /metrics."""
        return generate_latest(self.registry)
