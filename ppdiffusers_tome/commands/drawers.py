"""Where images are generated, in this process or on Ray: options that commands share, and their meaning."""

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import ToMeConfigError, ToMeError, install_command
from ..generation.offline import Drawer, draw_here
from ..inference import RUNTIMES
from ..serving.engine import Engine

MakeDrawer = Callable[[Callable[[], Engine]], Drawer]  # its argument loads an engine, in the process that needs it


def add_image_options(group: "argparse._ArgumentGroup | argparse.ArgumentParser") -> None:
    """Add the options of the images that `evaluate` and `tune` compare."""
    option, default = group.add_argument, "(default: %(default)s)"
    option("--prompts", type=Path, help=".txt, .jsonl or .tsv (PartiPrompts) (default: prompts.txt of the model)")
    option("--seed", type=int, default=0, help=f"of the first image; each further one adds 1 {default}")
    option("--steps", type=int, default=10, help=f"denoising steps {default}")
    option("--guidance-scale", type=float, default=2.0, help=f"weight of classifier-free guidance {default}")


def add_runtime_options(command: argparse.ArgumentParser) -> None:
    """Add the options that `runtime_settings` reads."""
    option = command.add_argument
    option("--runtime", choices=RUNTIMES, default="paddle", help="what runs the programs (default: %(default)s)")
    option("--device", default="cpu", help="cpu or gpu; of onnxruntime: cpu, cuda, tensorrt (default: %(default)s)")
    option("--precision", default="fp32", help="bf16 in openvino, fp16 or bf16 on GPUs (default: %(default)s)")
    option("--no-verify", dest="verify", action="store_false", help="do not check the weights against their hashes")


def runtime_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `load_pipeline` and `load_engine`, except the threads."""
    return {name: getattr(options, name) for name in ("runtime", "device", "precision", "verify")}


def uses_gpu(options: argparse.Namespace) -> bool:
    """Whether the programs run on a GPU, as far as the device's name says so."""
    return options.device.startswith(("gpu", "cuda", "tensorrt"))


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options that `open_drawers` reads."""
    command.add_argument(
        "--threads",
        type=int,
        help="CPU threads per process (default: all cores, divided among the actors; 1 with --ray-address)",
    )
    ray = command.add_argument_group(f"on several processes or machines ({install_command('ray')})")
    ray.add_argument("--ray", action="store_true", help="generate on Ray actors; one that dies is restarted")
    ray.add_argument(
        "--actors", type=int, default=2, help="number of actors; each loads the model (default: %(default)s)"
    )
    ray.add_argument("--ray-address", help="address of a Ray cluster (default: start Ray on this machine)")


def threads(options: argparse.Namespace) -> int | None:
    """Threads of each process with an engine; None for all cores."""
    for name in ("actors", "threads"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ToMeConfigError(f"--{name} {value} is not allowed: it must be 1 or more")
    if options.threads or not options.ray:
        return options.threads
    return 1 if options.ray_address else max(1, (os.cpu_count() or 1) // options.actors)


@contextmanager
def open_drawers(options: argparse.Namespace, gpu: bool) -> Iterator[MakeDrawer]:
    """A function that makes drawers. With --ray, Ray runs as long as the context.

    Raises:
        ToMeError: --ray, and Ray is not installed.
    """
    if not options.ray:
        yield draw_here
        return
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise ToMeError(f"{error}. --ray needs: {install_command('ray')}") from error
    from ..generation.actors import draw_on_actors
    from ..serving.ray_session import ray_session

    cpus, gpus = threads(options) or 1, 1.0 if gpu else 0.0
    with ray_session(options.ray_address, options.actors * cpus, options.actors * gpus, shows_logs=False):
        yield lambda load: draw_on_actors(load, options.actors, cpus, gpus)
