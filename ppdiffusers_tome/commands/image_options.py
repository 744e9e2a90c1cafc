"""Options that commands which generate images share: steps, runtime, and this process or Ray."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from ..cores import usable_cores
from ..errors import ParameterError, ToMeConfigError, ToMeError, install_command
from ..run.defaults import ModelDefaults
from ..run.formats import RUNTIME_FORMATS, check_format, default_runtime
from ..run.manifest import Manifest
from ..serving.jobs import Job, JobError

if TYPE_CHECKING:
    from ..serving.offline import MakeImageBackend

MODEL_DEFAULT_HELP = "(default: the model's own)"
Options: TypeAlias = argparse.ArgumentParser | argparse._ArgumentGroup
DEFAULTS = ModelDefaults(steps=Job.steps, guidance_scale=Job.guidance_scale)  # for models without their own


def add_command(
    commands: argparse._SubParsersAction, name: str, about: str, example: str, description: str | None = None
) -> argparse.ArgumentParser:
    """Add a command whose help ends with an example.

    Args:
        about: what it does, in a line of the list of commands.
        example: command lines, indented.
        description: more than `about`, for the command's own help.
    """
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=about,
        description=description or about[0].upper() + about[1:] + ".",
        epilog=f"example:\n{example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(parser=command)  # for errors about arguments that it does not have
    return command


def add_step_options(group: Options, default: str = "(default: the model's own, or {})") -> None:
    """Add the options that `step_settings` reads."""
    group.add_argument("--steps", type=int, help=f"denoising steps {default.format(DEFAULTS.steps)}")
    scale = f"weight of classifier-free guidance {default.format(DEFAULTS.guidance_scale)}"
    group.add_argument("--guidance-scale", type=float, help=scale)


def step_settings(options: argparse.Namespace, own: ModelDefaults) -> dict[str, Any]:
    """The number of steps and the guidance scale that an exported model generates with unless a job sets them."""
    sources = (options, own, DEFAULTS)
    names = ("steps", "guidance_scale")
    return {name: next(v for s in sources if (v := getattr(s, name)) is not None) for name in names}


def add_runtime_options(command: argparse.ArgumentParser) -> None:
    """Add the options that `runtime_settings` reads."""
    option = command.add_argument
    default = "onnxruntime; paddle with --device gpu, or if the export has no ONNX programs"
    option("--runtime", choices=RUNTIME_FORMATS, help=f"what runs the programs (default: {default})")
    option("--device", default="cpu", help="cpu or gpu; of onnxruntime: cpu, cuda (default: %(default)s)")
    option("--precision", default="fp32", help="bf16 in openvino, fp16 or bf16 on GPUs (default: %(default)s)")
    option("--max-programs", type=int, help="largest number of the UNet's programs in memory (default: all in use)")
    option("--no-verify", dest="verify", action="store_false", help="do not check the weights against their hashes")


def runtime_settings(manifest: Manifest, options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `load_pipeline` and `load_engine` for an exported folder, except the threads."""
    settings = {name: getattr(options, name) for name in ("device", "precision", "verify", "max_programs")}
    settings["runtime"] = options.runtime or default_runtime(manifest, options.device)
    return settings


@contextmanager
def naming_options(**options: str) -> Iterator[None]:
    """In this context, errors about a parameter name the option that sets it, by default that of the same name.

    Args:
        options: what sets a parameter whose option has a different name.

    Raises:
        ToMeConfigError: instead of a ParameterError or a JobError.
    """

    def option(parameter: str) -> str:
        return options.get(parameter, "--" + parameter.replace("_", "-"))

    try:
        yield
    except ParameterError as error:
        values = error.value if isinstance(error.value, tuple) else () if error.value is True else (error.value,)
        given = " ".join([option(error.name), *map(str, values)])
        raise ToMeConfigError(f"{given} is not allowed: {error.rule}") from error
    except JobError as error:
        raise ToMeConfigError(f"{option(error.field)}: {error}") from error


def check_runtime(manifest: Manifest, options: argparse.Namespace) -> None:
    """Raise ToMeError if the folder was not exported for the runtime, or if this machine lacks it and must have it."""
    from ..run.pipeline import choose_runtime

    settings = runtime_settings(manifest, options)
    check_format(options.model, manifest, settings["runtime"])
    if options.max_programs is not None and options.max_programs < 1:
        raise ToMeConfigError(f"--max-programs {options.max_programs} is not allowed: it must be 1 or more")
    if options.ray_address:  # the machines of a Ray cluster are not known here
        return
    settings["threads"] = options.threads
    with naming_options():  # now and not when the model loads
        choose_runtime(**{name: value for name, value in settings.items() if name not in ("verify", "max_programs")})


def add_worker_options(command: argparse.ArgumentParser) -> None:
    """Add the options that `open_image_backend` reads."""
    default = "(default: all cores, divided among the actors; 1 with --ray-address)"
    command.add_argument("--threads", type=int, help=f"CPU threads per process {default}")
    ray = command.add_argument_group(f"on several processes or machines ({install_command('ray')})")
    ray.add_argument("--ray", action="store_true", help="generate on Ray actors; one that dies is restarted")
    actors = "number of actors; each loads the model (default: %(default)s)"
    ray.add_argument("--actors", type=int, default=2, help=actors)
    ray.add_argument("--ray-address", help="address of a Ray cluster (default: start Ray on this machine)")


def threads_per_process(options: argparse.Namespace) -> int | None:
    """Threads of each process with an engine; None for all cores."""
    for name in ("actors", "threads"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ToMeConfigError(f"--{name} {value} is not allowed: it must be 1 or more")
    if options.threads or not options.ray:
        return options.threads
    return 1 if options.ray_address else max(1, usable_cores() // options.actors)


def import_ray_engines() -> ModuleType:
    """`serving.ray_engines`; ToMeError if Ray is not installed."""
    try:
        import ray  # noqa: F401

        from ..serving import ray_engines
    except ImportError as error:
        raise ToMeError(f"{error}. --ray needs: {install_command('ray')}") from error
    return ray_engines


@contextmanager
def open_image_backend(options: argparse.Namespace, gpu: bool) -> "Iterator[MakeImageBackend]":
    """A function that makes image backends. With --ray, Ray runs as long as the context.

    Raises:
        ToMeError: --ray, and Ray is not installed.
    """
    if not options.ray:
        from ..serving.offline import generate_here

        yield generate_here
        return
    ray_engines = import_ray_engines()
    cpus, gpus = threads_per_process(options) or 1, 1.0 if gpu else 0.0
    with ray_engines.ray_session(options.ray_address, options.actors * cpus, options.actors * gpus, shows_logs=False):
        yield lambda load: ray_engines.generate_on_ray(load, options.actors, cpus, gpus)
