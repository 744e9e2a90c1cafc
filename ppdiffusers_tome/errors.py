"""The package's exceptions, and a remedy that several of them name.

Each is a `ToMeError` and also the built-in exception that matches.
"""

import shlex
from pathlib import Path

REQUIREMENTS = Path(__file__).parent / "requirements"


class ToMeError(Exception):
    """Base class of all exceptions that this package defines."""


class ToMeConfigError(ToMeError, ValueError):
    """An argument has a value that is not allowed; the message names argument, value and allowed values."""


class NotExportedError(ToMeConfigError, AttributeError):
    """An exported pipeline cannot do what was asked for, because its programs are fixed.

    It is an AttributeError because ppdiffusers uses `hasattr` to find out what a model has.
    """


class ParameterError(ToMeConfigError):
    """A parameter has a value that is not allowed. Commands name the option that sets it in its place.

    Args:
        name: the name of the parameter.
        value: its value.
        rule: the values that are allowed.
    """

    def __init__(self, name: str, value: object, rule: str) -> None:
        super().__init__(name, value, rule)
        self.name, self.value, self.rule = name, value, rule

    def __str__(self) -> str:
        return f"{self.name}={self.value!r:.200} is not allowed: {self.rule}"


class NoMergeableLayerError(ToMeError, ValueError):
    """A pipeline or model has no layer that these settings could merge."""


class ToMePassError(ToMeError, RuntimeError):
    """In a forward pass, a merging layer received tensors that do not match its token grid."""


class ToMeExportError(ToMeError, RuntimeError):
    """A pipeline cannot be exported, its program differs from the model, or an exported folder cannot be used."""


class FolderError(ToMeConfigError, ToMeExportError):
    """A folder that was passed cannot be used for this: it is no export, or it has other content."""


class ExportChangedError(ToMeExportError):
    """The files of an exported folder are not those that were loaded, so its programs would not match each other."""


class UnsupportedVersionError(ToMeError, RuntimeError):
    """An installed package has a version that gives wrong results or was never tested."""


def install_command(feature: str) -> str:
    """The command that installs what an optional feature needs, for error messages.

    It names a file of locked versions in the package: what pip chooses for the extras of `setup.py` replaces packages
    of the environment, and ppdiffusers no longer imports.

    Args:
        feature: "serve", "onnx" (OpenVINO too) or "ray".

    Example:
        >>> install_command("serve").endswith("/ppdiffusers_tome/requirements/serve.txt")
        True
    """
    file = REQUIREMENTS / f"{feature}.txt"
    return f"pip install --no-deps -r {shlex.quote(str(file))}"
