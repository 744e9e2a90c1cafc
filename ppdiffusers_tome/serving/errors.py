"""What can go wrong between a request and its picture, as types. All survive pickling, which Ray does to them."""

from ..errors import ToMeConfigError, ToMeError


class JobError(ToMeConfigError):
    """A job asks for what cannot be done; `field` is the name of the job's field, the message says what is allowed."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field

    def __reduce__(self) -> tuple:
        return type(self), (self.field, str(self))


class AbandonedError(ToMeError, RuntimeError):
    """Nobody waits for these pictures any more, so drawing them was stopped between two steps."""


class DrawingError(ToMeError, RuntimeError):
    """The pipeline failed; the log of the server has the reason."""


class UnavailableError(ToMeError, RuntimeError):
    """The server takes no job at the moment; `retry_after` is how many seconds to wait before asking again."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after

    def __reduce__(self) -> tuple:
        return type(self), (str(self), self.retry_after)


class QueueFullError(UnavailableError):
    """As many pictures wait as the queue holds."""


class NotReadyError(UnavailableError):
    """The model is still being loaded, or failed to load."""


class DrainingError(UnavailableError):
    """The server was told to stop: it finishes what it has accepted and accepts nothing more."""
