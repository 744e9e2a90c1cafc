"""Server-sent events: the progress of one request, then its images or an error."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

from fastapi.responses import StreamingResponse

from ..generation.jobs import Job
from .api_errors import ApiError, internal_error
from .protocol import CompletedEvent, ErrorEvent, MergeMap, ProgressEvent
from .tickets import RequestProgress

logger = logging.getLogger(__name__)
POLL_SECONDS = 0.1  # between two looks at the progress
REPEAT_SECONDS = 5.0  # an event is repeated after this time, for proxies; after 10 s without one, the page says so


async def stream_events(
    images: Coroutine[None, None, list[str]], jobs: Sequence[Job], progress: RequestProgress
) -> StreamingResponse:
    """The response to a request that asks for a stream.

    Args:
        images: generates the images of the jobs. It is cancelled when the client disconnects.
        jobs, progress: of these images.

    Raises:
        ApiError: the request is not accepted. The response has not begun, so the client gets an ordinary error.
    """
    pending = asyncio.ensure_future(images)
    pending.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may have no reader any more
    while progress.position is None and not pending.done():
        await asyncio.wait([pending], timeout=POLL_SECONDS / 10)
    if progress.position is None:
        pending.result()  # raises
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # the latter is for nginx
    return StreamingResponse(_events(pending, jobs, progress), media_type="text/event-stream", headers=headers)


async def _events(
    pending: "asyncio.Future[list[str]]", jobs: Sequence[Job], progress: RequestProgress
) -> AsyncIterator[str]:
    loop = asyncio.get_running_loop()
    last, sent = None, 0.0
    try:
        while not pending.done():
            event = ProgressEvent(position=progress.position or 0, step=progress.step, steps=progress.steps)
            if event != last or loop.time() - sent > REPEAT_SECONDS:
                last, sent = event, loop.time()
                yield _text(event)
            await asyncio.wait([pending], timeout=POLL_SECONDS)
        try:
            images = pending.result()
        except ApiError as error:
            yield _text(ErrorEvent(error=error.openai_error()))
        except Exception:  # a bug in this package, as in `RequestMiddleware`
            logger.exception("a stream failed")
            yield _text(ErrorEvent(error=internal_error().openai_error()))
        else:
            for index, (image, job) in enumerate(zip(images, jobs, strict=True)):
                completed = CompletedEvent(
                    b64_json=image,
                    created_at=int(time.time()),
                    size=str(job.size),
                    seed=job.seed,
                    index=index,
                    seconds=progress.seconds,
                    batch=progress.batch,
                    step_seconds=progress.step_seconds,
                    merge_map=_merge_map(progress.merge_maps[index]),
                )
                yield _text(completed)
    finally:
        pending.cancel()


def _merge_map(groups: Any) -> MergeMap | None:
    """The event's field from an array [h, w]."""
    if groups is None:
        return None
    height, width = groups.shape
    return MergeMap(width=width, height=height, groups=groups.ravel().tolist())


def _text(event: ProgressEvent | CompletedEvent | ErrorEvent) -> str:
    return f"event: {event.type}\ndata: {event.model_dump_json()}\n\n"
