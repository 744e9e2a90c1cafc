"""Errors between a request and its image. All survive pickling, because Ray sends them between processes."""

from ..errors import ToMeConfigError, ToMeError


class JobError(ToMeConfigError):
    """A job is not allowed. `field` is the name of the job's field; the message says which values are allowed."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field

    def __reduce__(self) -> tuple:
        return type(self), (self.field, str(self))


class AbandonedError(ToMeError, RuntimeError):
    """No client waits for these images any more, so the pipeline call was stopped between two steps."""


class DrawingError(ToMeError, RuntimeError):
    """The pipeline failed; the server's log has the reason."""


class JobFailedError(DrawingError):
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
