"""A server's counters in Prometheus' format. Every server has its own registry."""

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)


class Metrics:
    """Counters and gauges. `CountingMiddleware` sets those of requests, `JobQueue` and `EnginePool` set the rest.

    Status 499: the client disconnected before the answer. The outcome of an image is "generated", "failed" (the
    pipeline raised) or "abandoned" (no client waits).
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        own: dict[str, Any] = {"namespace": "ppdiffusers_tome", "registry": self.registry}
        self.requests = Counter("requests", "Requests by endpoint and status", ("endpoint", "status"), **own)
        self.request_seconds = Histogram(
            "request_seconds", "Seconds to the answer", ("endpoint",), buckets=SECONDS, **own
        )
        self.images = Counter("images", "Images by outcome", ("outcome",), **own)
        self.batch_images = Histogram("batch_images", "Images in one call", buckets=(1, 2, 3, 4, 6, 8, 12, 16), **own)
        self.batch_seconds = Histogram("batch_seconds", "Seconds of one call", buckets=SECONDS, **own)
        self.waiting = Gauge("waiting_images", "Images in the queue", **own)
        self.running = Gauge("running_images", "Images in the pipeline", **own)
        self.ready = Gauge("ready", "1 while jobs are accepted", **own)
        self.program_loads = Gauge("program_loads", "Programs that the engines have loaded", **own)
        for outcome in ("generated", "failed", "abandoned"):
            self.images.labels(outcome)

    @property
    def resident_bytes(self) -> float | None:
        """The memory of this process; None where the system does not report it in /proc."""
        return self.registry.get_sample_value("process_resident_memory_bytes")

    def page(self) -> bytes:
        """The text of /metrics."""
        return generate_latest(self.registry)
