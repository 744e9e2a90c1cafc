"""Server-sent events: the progress of one request, then its images or an error."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence

from fastapi.responses import StreamingResponse

from .api_errors import ApiError, internal_error
from .protocol import CompletedEvent, ErrorEvent, ProgressEvent
from .tickets import RequestProgress

logger = logging.getLogger(__name__)
POLL_SECONDS = 0.1  # between two looks at the progress
REPEAT_SECONDS = 5.0  # an event is repeated after this time, for proxies; after 10 s without one, the page says so


async def stream_events(
    images: Coroutine[None, None, list[str]],
    progress: RequestProgress,
    completed: Callable[[list[str]], Sequence[CompletedEvent]],
) -> StreamingResponse:
    """The response to a request that asks for a stream.

    Args:
        images: generates the images. It is cancelled when the client disconnects.
        progress: of these images.
        completed: the events that end the stream.

    Raises:
        ApiError: the request is not accepted. The response has not begun, so the client gets an ordinary error.
    """
    pending = asyncio.ensure_future(images)
    pending.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may have no reader any more
    try:
        while progress.position is None and not pending.done():
            await asyncio.wait([pending], timeout=POLL_SECONDS / 10)
    except asyncio.CancelledError:
        pending.cancel()
        raise
    if progress.position is None:
        pending.result()  # raises
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # the latter is for nginx
    return StreamingResponse(_events(pending, progress, completed), media_type="text/event-stream", headers=headers)


async def _events(
    pending: "asyncio.Future[list[str]]",
    progress: RequestProgress,
    completed: Callable[[list[str]], Sequence[CompletedEvent]],
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
            files = pending.result()
        except ApiError as error:
            yield _text(ErrorEvent(error=error.openai_error()))
        except Exception:  # a bug in this package, as in `RequestMiddleware`
            logger.exception("a stream failed")
            yield _text(ErrorEvent(error=internal_error().openai_error()))
        else:
            for image in completed(files):
                yield _text(image)
    finally:
        pending.cancel()


def _text(event: ProgressEvent | CompletedEvent | ErrorEvent) -> str:
    return f"event: {event.type}\ndata: {event.model_dump_json()}\n\n"
