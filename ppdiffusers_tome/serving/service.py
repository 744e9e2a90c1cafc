"""What both interfaces do for a request: make its jobs, and generate their images while its client waits."""

import asyncio
import base64
import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, TypeAlias

from fastapi import Depends, Request
from PIL import Image

from .api_errors import CLIENT_GONE, ApiError
from .app_config import AppConfig
from .image_engine import ServedModel
from .jobs import MAX_SEED, Job, seed_after
from .png import encode_png, load_image
from .pool import EnginePool
from .tickets import Ticket

DEFAULT_STRENGTH = 0.75  # of requests from an image, and of a second pass
MAX_LOGGED_NAMES = 100  # of ignored fields, so that clients cannot fill the log


Submission: TypeAlias = "asyncio.Future[list[Image.Image]]"


class ImageService:
    """Makes the jobs of requests and generates their images. Each application has a service, in `app.state.service`.

    Args:
        model: what requests may ask for.
        pool: generates the images of its queue.
        config: has the time limit of a request and the defaults of its fields.
    """

    def __init__(self, model: ServedModel, pool: EnginePool, config: AppConfig) -> None:
        self.model, self.pool, self.queue, self.config = model, pool, pool.queue, config
        self.created = int(time.time())  # shown by /v1/models
        self._interruptible: list[Submission] = []  # oldest first
        self._logged: set[str] = set()

    def jobs(self, images: int | None, seed: int | None, **values: Any) -> list[Job]:
        """The jobs of a request.

        Args:
            images: the number of jobs; 1 if it is None.
            seed: of the first image, None for a random seed; each further image has the next.
            values: of further fields of a `Job`. Those that are None or absent have the server's defaults.

        Raises:
            JobError: see `Job`.
        """
        limits, config = self.model.limits, self.config
        fields: dict[str, Any] = {"prompt": "", "size": limits.sizes[0], "ratio": limits.ratios[0]}
        fields |= {"steps": config.steps, "guidance_scale": config.guidance_scale}
        fields |= {name: value for name, value in values.items() if value is not None}
        first = secrets.randbelow(MAX_SEED + 1) if seed is None else seed
        return [Job(**fields, seed=seed_after(first, index)) for index in range(1 if images is None else images)]

    async def generate(
        self,
        request: Request,
        jobs: list[Job],
        image: str | bytes | None,
        on_accepted: Callable[[list[Ticket]], object] = lambda tickets: None,
        interruptible: bool = False,
    ) -> list[str]:
        """Generate the images of a request.

        Args:
            request: if its client disconnects, the jobs are abandoned.
            image: the image to start from, see `load_image`; None for noise.
            on_accepted: see `JobQueue.submit`.
            interruptible: whether `interrupt` ends the request.

        Returns:
            The image of each job, a PNG file in base64.

        Raises:
            ApiError: 409 interrupted, 499 the client disconnected, 504 the time limit.
            JobError, UnavailableError, GenerationError: see `JobQueue.submit`.
        """
        load = None if image is None else partial(load_image, image, jobs[0].size, self.model.limits)
        submission = asyncio.ensure_future(self.queue.submit(jobs, load, on_accepted))
        if interruptible:
            self._interruptible.append(submission)
        try:
            images = await self._while_connected(request, submission)
        finally:
            if interruptible:
                self._interruptible.remove(submission)
        encoded = [asyncio.to_thread(self._encode, image, job) for image, job in zip(images, jobs, strict=True)]
        return list(await asyncio.gather(*encoded))

    def _encode(self, image: Image.Image, job: Job) -> str:
        return base64.b64encode(encode_png(image, job, self.model)).decode()

    async def _while_connected(self, request: Request, submission: Submission) -> list[Image.Image]:
        """The images, unless the client disconnects or the time limit passes."""
        disconnection = asyncio.ensure_future(_disconnection(request))
        seconds = self.config.request_seconds
        try:
            await asyncio.wait((submission, disconnection), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if submission.cancelled():
                raise ApiError(409, "the request was interrupted by /sdapi/v1/interrupt or skip", code="interrupted")
            if submission.done():
                return submission.result()
            if disconnection.done():
                raise ApiError(CLIENT_GONE, "the client has disconnected")
            raise ApiError(504, f"the request took longer than {seconds:g} s", code="timeout")
        finally:
            submission.cancel()
            disconnection.cancel()
            await asyncio.gather(submission, disconnection, return_exceptions=True)

    def interrupt(self, count: int | None = None) -> None:
        """End the oldest `count` interruptible requests, or all, at the pipeline's next step."""
        for submission in self._interruptible[:count]:
            submission.cancel()

    def may_log(self, name: str) -> bool:
        """Whether the log may name an ignored field: each once, and at most MAX_LOGGED_NAMES."""
        if name in self._logged or len(self._logged) >= MAX_LOGGED_NAMES:
            return False
        self._logged.add(name)
        return True


async def _disconnection(request: Request) -> None:
    """Return when the client disconnects. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _service(request: Request) -> ImageService:
    return request.app.state.service


Service = Annotated[ImageService, Depends(_service)]  # a parameter of a route
