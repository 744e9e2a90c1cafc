"""Generate the images of a request while its client waits. Time-outs, disconnections and failures are errors."""

import asyncio
import base64
import secrets
from collections.abc import Mapping
from functools import partial
from typing import Any, TypeAlias

from fastapi import Request
from PIL import Image

from .api_errors import CLIENT_GONE, ApiError
from .app_config import AppConfig
from .engines import ServedModel
from .jobs import MAX_SEED, GenerationError, Job, JobError, make_jobs
from .png import encode_png, load_image
from .queue import JobQueue
from .tickets import QueueFullError, RequestProgress, UnavailableError

DEFAULT_STRENGTH = 0.75  # of requests from an image, and of a second pass


Submission: TypeAlias = "asyncio.Future[list[Image.Image]]"


class RequestHandler:
    """Generates the images of one interface's requests.

    Args:
        model, queue: what generates the images.
        config: has the time limit of a request and the defaults of its fields.
        names: the interface's names of those fields of a job that may be refused after the request was read, where
            they differ.
    """

    def __init__(self, model: ServedModel, queue: JobQueue, config: AppConfig, names: Mapping[str, str]) -> None:
        self._model, self._queue, self._seconds, self._names = model, queue, config.request_seconds, names
        size, ratio = model.limits.sizes[0], model.limits.ratios[0]
        self.defaults = Job("", size, ratio, seed=0, steps=config.steps, guidance_scale=config.guidance_scale)
        self._under_way: list[Submission] = []  # oldest first

    def make_jobs(self, images: int, seed: int | None, **values: Any) -> list[Job]:
        """The jobs of a request: None is the default, or a random seed; each image has the next seed.

        Raises:
            ApiError: 422, values are not allowed together.
        """
        first = secrets.randbelow(MAX_SEED + 1) if seed is None else seed
        try:
            return make_jobs(self.defaults, images, first, **values)
        except JobError as error:
            raise self.refusal(error) from None

    def refusal(self, error: JobError) -> ApiError:
        """The answer to a job that is not allowed, which names the field as this interface does."""
        return ApiError(422, str(error), self._names.get(error.field, error.field), "invalid_value")

    def unavailability(self, error: UnavailableError) -> ApiError:
        """The answer to a request that the queue does not accept now, with the seconds to wait before the next try."""
        is_full = isinstance(error, QueueFullError)
        status, code = (429, "queue_full") if is_full else (503, "unavailable")
        return ApiError(status, str(error), code=code, headers={"Retry-After": str(error.retry_after)})

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
            ApiError: 409 interrupted, 422 the image or the number of steps is not allowed, 429 the queue is full, 499
                the client disconnected, 500 the pipeline failed, 503 not ready or shutting down, 504 the time limit.
        """
        load = None if image is None else partial(load_image, image, jobs[0].size, self._model.limits)
        try:
            submission = asyncio.ensure_future(self._queue.submit(jobs, load, progress))
            images = await self._while_connected(request, submission)
        except JobError as error:
            raise self.refusal(error) from None
        except UnavailableError as error:
            raise self.unavailability(error) from None
        except GenerationError as error:
            raise ApiError(500, str(error), code="generation_failed") from None
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
