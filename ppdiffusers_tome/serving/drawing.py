"""From a request's fields to PNG files, while the client waits: time-outs, hang-ups and failures become refusals."""

import asyncio
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import Request
from PIL.Image import Image

from .errors import DrawingError, JobError, QueueFullError, UnavailableError
from .jobs import LARGEST_SEED, Job
from .pictures import encode_png
from .refusals import CLIENT_GONE, Refusal
from .service import Service
from .settings import Settings


class Drawing:
    """Draws what comes through one interface.

    Args:
        service: draws the jobs.
        settings: the time that a request may take, and what it means where it leaves things out.
        names: what the interface calls a job's fields, where it differs.
    """

    def __init__(self, service: Service, settings: Settings, names: Mapping[str, str]) -> None:
        self._service, self._settings, self._names = service, settings, names
        self._under_way: list[asyncio.Future[list[Image]]] = []  # oldest first

    def make_jobs(self, images: int, seed: int | None, **fields: Any) -> list[Job]:
        """The jobs of a request: what is None is the default, and seeds count on, modulo 2**32."""
        limits, settings = self._service.limits, self._settings
        height, width = limits.sizes[0]
        defaults = {"height": height, "width": width, "ratio": limits.ratios[0], "steps": settings.steps}
        defaults["guidance_scale"] = settings.guidance_scale
        given = {name: value for name, value in fields.items() if value is not None}
        first = secrets.randbelow(LARGEST_SEED + 1) if seed is None else seed
        return [Job(**{**defaults, **given}, seed=(first + n) % (LARGEST_SEED + 1)) for n in range(images)]

    async def draw(
        self, request: Request, jobs: list[Job], load_image: Callable[[], Image] | None = None
    ) -> list[bytes]:
        """Check and draw the jobs of one request.

        Args:
            request: whose client waits; when it hangs up, the jobs are abandoned.
            load_image: see `Service.submit`.

        Returns:
            One PNG file for each job.

        Raises:
            Refusal: 409 interrupted, 422 a job is not allowed, 429 the queue is full, 499 the client has gone, 500 the
                pipeline failed, 503 not ready or shutting down, 504 it took too long.
        """
        service = self._service
        try:
            service.limits.check_count(len(jobs))
            for job in jobs:
                service.limits.check(job)
            images = await self._while_connected(request, asyncio.ensure_future(service.submit(jobs, load_image)))
        except JobError as error:
            raise Refusal(422, str(error), self._names.get(error.field, error.field), "invalid_value") from None
        except UnavailableError as error:
            is_full = isinstance(error, QueueFullError)
            status, code = (429, "queue_full") if is_full else (503, "unavailable")
            raise Refusal(status, str(error), code=code, headers={"Retry-After": str(error.retry_after)}) from None
        except DrawingError as error:
            raise Refusal(500, str(error), code="drawing_failed") from None
        files = [
            asyncio.to_thread(encode_png, image, job, service.name, service.sampler)
            for image, job in zip(images, jobs, strict=True)
        ]
        return list(await asyncio.gather(*files))

    def interrupt(self, most: int | None = None) -> None:
        """End the requests under way, or so many of the oldest, at the next step of the pipeline."""
        for drawing in self._under_way[:most]:
            drawing.cancel()

    async def _while_connected(self, request: Request, drawing: "asyncio.Future[list[Image]]") -> list[Image]:
        """The images, unless the client hangs up, the time is over or the request is interrupted."""
        gone = asyncio.ensure_future(_disconnection(request))
        seconds = self._settings.request_seconds
        self._under_way.append(drawing)
        try:
            await asyncio.wait((drawing, gone), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if drawing.cancelled():
                raise Refusal(409, "the request was interrupted by /sdapi/v1/interrupt or skip", code="interrupted")
            if drawing.done():
                return drawing.result()
            if gone.done():
                raise Refusal(CLIENT_GONE, "the client has gone")
            raise Refusal(504, f"it took longer than {seconds:g} s", code="timeout")
        finally:
            self._under_way.remove(drawing)
            drawing.cancel()
            gone.cancel()
            await asyncio.gather(drawing, gone, return_exceptions=True)


async def _disconnection(request: Request) -> None:
    """Return when the client hangs up. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
