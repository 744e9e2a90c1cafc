"""What can go wrong, as types: each error is a `ToMeError` and also the built-in error that its cause suggests."""


class ToMeError(Exception):
    """Base class of the errors that this package raises on purpose."""


class ToMeConfigError(ToMeError, ValueError):
    """An argument has a value that is not allowed; the message names the argument, the value and what is allowed."""


class NoMergeableLayerError(ToMeError, ValueError):
    """A pipeline or model has no layer that the given settings could merge."""


class ToMePassError(ToMeError, RuntimeError):
    """A forward pass reached a merging layer with tensors that do not fit its token grid."""


class ToMeExportError(ToMeError, RuntimeError):
    """A pipeline cannot be exported, its program differs from the model, or an exported folder cannot be used."""


class UnsupportedVersionError(ToMeError, RuntimeError):
    """An installed package has a version that is known or presumed to give wrong results."""
