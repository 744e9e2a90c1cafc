"""Errors of a server. All survive pickling, because Ray sends them between processes."""

from ..errors import ToMeError
from ..generation.jobs import GenerationError


class JobFailedError(GenerationError):
    """The pipeline failed on this job only: it still generates a plain image of the same size and ratio."""


class UnavailableError(ToMeError, RuntimeError):
    """The server accepts no job at the moment; `retry_after` is the number of seconds to wait before the next try."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after

    def __reduce__(self) -> tuple:
        return type(self), (str(self), self.retry_after)


class QueueFullError(UnavailableError):
    """The queue holds as many images as it may."""


class NotReadyError(UnavailableError):
    """The model is still loading, or failed to load."""


class DrainingError(UnavailableError):
    """The server is shutting down: it finishes accepted jobs and accepts no others."""
