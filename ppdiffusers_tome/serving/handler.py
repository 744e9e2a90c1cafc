"""Generate the images of a request while its client waits. Time-outs, disconnections and failures are errors."""

import asyncio
import base64
from functools import partial
from typing import TypeAlias

from fastapi import Request
from PIL import Image

from .api_errors import CLIENT_GONE, ApiError
from .app_config import AppConfig
from .image_engine import ServedModel
from .jobs import Job
from .png import encode_png, load_image
from .queue import JobQueue
from .tickets import RequestProgress

DEFAULT_STRENGTH = 0.75  # of requests from an image, and of a second pass


Submission: TypeAlias = "asyncio.Future[list[Image.Image]]"


class RequestHandler:
    """Generates the images of one interface's requests.

    Args:
        model, queue: what generates the images.
        config: has the time limit of a request and the defaults of its fields.
    """

    def __init__(self, model: ServedModel, queue: JobQueue, config: AppConfig) -> None:
        self._model, self._queue, self._seconds = model, queue, config.request_seconds
        size, ratio = model.limits.sizes[0], model.limits.ratios[0]
        self.defaults = Job("", size, ratio, seed=0, steps=config.steps, guidance_scale=config.guidance_scale)
        self._under_way: list[Submission] = []  # oldest first

    async def generate(
        self, request: Request, jobs: list[Job], image: str | bytes | None, progress: RequestProgress
    ) -> list[str]:
        """Generate the images of one request.

        Args:
            request: if its client disconnects, the jobs are abandoned.
            image: the image to start from, see `load_image`; None for noise.
            progress: see `JobQueue.submit`.

        Returns:
            The image of each job, a PNG file in base64.

        Raises:
            ApiError: 409 interrupted, 499 the client disconnected, 504 the time limit.
            JobError, UnavailableError, GenerationError: see `JobQueue.submit`.
        """
        load = None if image is None else partial(load_image, image, jobs[0].size, self._model.limits)
        submission = asyncio.ensure_future(self._queue.submit(jobs, load, progress))
        images = await self._while_connected(request, submission)
        encoded = [asyncio.to_thread(self._encode, image, job) for image, job in zip(images, jobs, strict=True)]
        return list(await asyncio.gather(*encoded))

    def _encode(self, image: Image.Image, job: Job) -> str:
        return base64.b64encode(encode_png(image, job, self._model)).decode()

    def interrupt(self, count: int | None = None) -> None:
        """End the oldest `count` requests, or all, at the pipeline's next step."""
        for submission in self._under_way[:count]:
            submission.cancel()

    async def _while_connected(self, request: Request, submission: Submission) -> list[Image.Image]:
        """The images, unless the client disconnects, the time limit passes or the request is interrupted."""
        disconnection = asyncio.ensure_future(_disconnection(request))
        self._under_way.append(submission)
        try:
            await asyncio.wait((submission, disconnection), timeout=self._seconds, return_when=asyncio.FIRST_COMPLETED)
            if submission.cancelled():
                raise ApiError(409, "the request was interrupted by /sdapi/v1/interrupt or skip", code="interrupted")
            if submission.done():
                return submission.result()
            if disconnection.done():
                raise ApiError(CLIENT_GONE, "the client has disconnected")
            raise ApiError(504, f"the request took longer than {self._seconds:g} s", code="timeout")
        finally:
            self._under_way.remove(submission)
            submission.cancel()
            disconnection.cancel()
            await asyncio.gather(submission, disconnection, return_exceptions=True)


async def _disconnection(request: Request) -> None:
    """Return when the client disconnects. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
