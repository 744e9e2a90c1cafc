"""What a server counts, in Prometheus' form. Every server has a registry of its own."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

PREFIX = "ppdiffusers_tome"
SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)


class Metrics:
    """Counters and gauges, of requests (where HTTP comes in) and of pictures (where they are drawn).

    Attributes:
        requests: answered requests by endpoint and status; status 499: the client hung up before the answer.
        request_seconds: from the first byte of a request's body to its answer, by endpoint.
        pictures: pictures by outcome: "drawn", "failed" (the pipeline raised) or "abandoned" (nobody waited any more).
        batch_pictures, batch_seconds: how many pictures were drawn in one pipeline call, and how long it took.
        waiting, running: pictures in the queue and in the pipeline now.
        ready: 1 while jobs are accepted.
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
        self.pictures = Counter(f"{PREFIX}_pictures", "Pictures by outcome", ("outcome",), registry=registry)
        self.batch_pictures = Histogram(
            f"{PREFIX}_batch_pictures", "Pictures in one call", buckets=(1, 2, 3, 4, 6, 8, 12, 16), registry=registry
        )
        self.batch_seconds = Histogram(
            f"{PREFIX}_batch_seconds", "Seconds of one call", buckets=SECONDS, registry=registry
        )
        self.waiting = Gauge(f"{PREFIX}_waiting_pictures", "Pictures in the queue", registry=registry)
        self.running = Gauge(f"{PREFIX}_running_pictures", "Pictures being drawn", registry=registry)
        self.ready = Gauge(f"{PREFIX}_ready", "1 while jobs are accepted", registry=registry)
        for outcome in ("drawn", "failed", "abandoned"):
            self.pictures.labels(outcome)

    def page(self) -> bytes:
        """The text that /metrics answers with."""
        return generate_latest(self.registry)
