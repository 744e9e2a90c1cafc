"""The runtimes by name: which programs each runs, which is the default, and what is a GPU. Paddle is not imported."""

from pathlib import Path

from ..errors import FolderError
from .manifest import Format, Manifest

RUNTIME_FORMATS: dict[str, Format] = {"paddle": "paddle", "onnxruntime": "onnx", "openvino": "onnx"}


def default_runtime(manifest: Manifest, device: str) -> str:
    """The name of the default runtime for an exported folder on a device.

    On a CPU that is ONNX Runtime, whose programs are faster there than those of Paddle Inference. "gpu" is a device of
    Paddle Inference, "cuda" one of ONNX Runtime. A folder that has only one of the two formats runs in that one.
    """
    names = ("paddle", "onnxruntime") if str(device).partition(":")[0] == "gpu" else ("onnxruntime", "paddle")
    return next(name for name in names if RUNTIME_FORMATS[name] in manifest.formats)


def check_format(folder: Path, manifest: Manifest, runtime: str) -> None:
    """Raise FolderError if a folder has no programs for a runtime of this name."""
    if RUNTIME_FORMATS[runtime] not in manifest.formats:
        missing = {"paddle": "Paddle", "onnx": "ONNX"}[RUNTIME_FORMATS[runtime]]
        existing = [name for name, format in RUNTIME_FORMATS.items() if format in manifest.formats]
        raise FolderError(
            f"{folder} has no {missing} programs: load it in the runtime {' or '.join(existing)}, or export it with "
            "--format both."
        )


def is_gpu(device: str) -> bool:
    """Whether a device of any runtime is a GPU, as far as its name says so."""
    return str(device).lower().startswith(("gpu", "cuda"))
