"""From checked jobs to PNG files, while the client waits: time-outs, hang-ups and failures become refusals."""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Mapping, Sequence
from typing import TypeVar

from fastapi import Request

from .errors import DrawingError, JobError, UnavailableError
from .jobs import LARGEST_SEED, Job
from .pictures import encode_png
from .refusals import CLIENT_GONE, Refusal, refuse_for_now, refuse_job
from .service import Service
from .settings import Settings

logger = logging.getLogger(__name__)
T = TypeVar("T")


async def draw(
    request: Request, service: Service, settings: Settings, jobs: Sequence[Job], names: Mapping[str, str]
) -> list[bytes]:
    """Check and draw jobs.

    Args:
        request: whose client waits; when it hangs up, the jobs are abandoned.
        jobs: of one request.
        names: what the interface calls a job's fields, where it differs.

    Returns:
        One PNG file for each job.

    Raises:
        Refusal: 422 a job is not allowed, 429 the queue is full, 499 the client has gone, 500 the pipeline failed,
            503 not ready or shutting down, 504 it took too long.
    """
    try:
        for job in jobs:
            service.limits.check(job)
        images = await _while_connected(request, service.submit(jobs), settings.request_seconds)
    except JobError as error:
        raise refuse_job(error, names) from None
    except UnavailableError as error:
        raise refuse_for_now(error) from None
    except DrawingError as error:
        raise Refusal(500, str(error), code="drawing_failed") from None
    files = [
        asyncio.to_thread(encode_png, image, job, service.name, service.sampler)
        for image, job in zip(images, jobs, strict=True)
    ]
    return list(await asyncio.gather(*files))


def choose_seed(images: int) -> int:
    """A seed for a request that names none, such that the seeds of all its pictures are allowed."""
    return secrets.randbelow(LARGEST_SEED - images + 2)


async def _while_connected(request: Request, work: Awaitable[T], seconds: float) -> T:
    """The result of work, unless the client hangs up or the time is over: then work is cancelled."""
    doing = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnection(request))
    try:
        await asyncio.wait({doing, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        if gone.done():
            raise Refusal(CLIENT_GONE, "the client has gone")
        raise Refusal(504, f"it took longer than {seconds:g} s", code="timeout")
    finally:
        doing.cancel()
        gone.cancel()
        await asyncio.gather(doing, gone, return_exceptions=True)


async def _disconnection(request: Request) -> None:
    """Return when the client hangs up. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
