"""`serve`: serve an exported model over HTTP."""

import argparse
import logging
import os
import sys
import webbrowser
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from ..cores import usable_cores
from ..errors import ToMeConfigError, ToMeError, install_command
from ..run.defaults import read_defaults
from ..run.formats import is_gpu
from ..run.manifest import Manifest, read_manifest
from ..run.sizes import parse_size
from ..serving.app_config import KEY_VARIABLE, LOCAL_HOSTS, AppConfig, dns_name
from ..serving.image_engine import served_model
from ..serving.limits import Limits
from .image_options import (
    add_command,
    add_runtime_options,
    add_step_options,
    check_runtime,
    import_ray_engines,
    naming_options,
    runtime_settings,
    step_settings,
)

logger = logging.getLogger("uvicorn.error")  # that of the server, which writes "listening at"

if TYPE_CHECKING:
    from ..serving.engine import Engine
    from ..serving.image_engine import LoadEngine
    from ..serving.pool import EnginePool
    from ..serving.prometheus import Metrics

DESCRIPTION = f"""\
Serve an exported model over HTTP, for clients of OpenAI and of stable-diffusion-webui, with a page for
browsers. If the environment variable {KEY_VARIABLE} is set, clients must send its value
as their API key."""
EXAMPLE = """\
  python -m ppdiffusers_tome serve --model build/scenes --port 8000 --open
  # build/scenes: the example of export --help"""


def add(commands: argparse._SubParsersAction) -> None:
    """Add `serve` to the command line."""
    about = "serve an exported model over HTTP, for clients of OpenAI and of stable-diffusion-webui"
    serve = add_command(commands, "serve", about, EXAMPLE, DESCRIPTION)
    option = serve.add_argument
    default = "(default: %(default)s)"
    option("--model", type=Path, required=True, help="folder written by the command export")
    option("--host", default="127.0.0.1", help=f"address to listen on, 0.0.0.0 for all of this machine's {default}")
    option("--port", type=int, default=8000, help=f"0 for a free one {default}")
    add_runtime_options(serve)
    option("--threads", type=int, help="CPU threads (default: all cores)")
    option("--size", nargs="+", help="px or WIDTHxHEIGHT in px, the default first (default: all exported sizes)")
    option("--queue", type=int, default=64, help=f"how many images may wait; further requests get 429 {default}")
    option("--batch", type=int, default=4, help=f"largest number of images in one pipeline call {default}")
    option("--batch-wait", type=float, default=0.02, help=f"seconds to wait for others in the same call {default}")
    option("--timeout", type=float, default=AppConfig.request_seconds, help=f"seconds for one request {default}")
    keep_alive = f"seconds until an idle connection is closed, more than in a proxy before this server {default}"
    option("--keep-alive", type=float, default=AppConfig.keep_alive_seconds, help=keep_alive)
    add_step_options(serve)
    option("--max-images", type=int, default=Limits.images, help=f"largest number of images in one request {default}")
    option("--max-steps", type=int, default=Limits.steps, help=f"largest number of steps {default}")
    option("--max-prompt", type=int, default=Limits.prompt_characters, help=f"characters of a prompt {default}")
    option("--max-body", type=int, default=AppConfig.body_bytes, help=f"largest request, bytes {default}")
    option("--allow-host", action="append", default=[], help="another name of this server, without an API key")
    option("--allow-origin", action="append", default=[], help="web page or app that may send requests: SCHEME://HOST")
    option("--any-model", action="store_true", help="accept any name of a model in requests, such as dall-e-3")
    option("--max-pixels", type=int, default=Limits.image_pixels, help=f"largest image of a client, pixels {default}")
    page = serve.add_mutually_exclusive_group()
    page.add_argument("--open", action="store_true", help="open the page in a browser when the server is ready")
    page.add_argument("--no-page", action="store_true", help="no page for browsers at /, only the API")
    ray = serve.add_argument_group(f"on several processes or machines, with Ray ({install_command('ray')})")
    ray.add_argument("--ray", action="store_true", help="run engines in their own processes; replace those that die")
    ray.add_argument("--replicas", type=int, default=1, help=f"number of engines; each loads the model {default}")
    ray.add_argument("--min-replicas", type=int, help="instead of --replicas: the number follows the load")
    ray.add_argument("--max-replicas", type=int, help="see --min-replicas")
    ray.add_argument("--replica-cpus", type=float, help="CPUs reserved per engine (default: an equal share)")
    ray.add_argument("--ray-address", help="address of a Ray cluster (default: start Ray on this machine)")
    serve.set_defaults(run=_serve)


def _serve(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    _check_packages()
    from ..serving.app import create_app
    from ..serving.engine import load_warm_engine
    from ..serving.prometheus import Metrics
    from ..serving.server import listen, serve

    manifest = read_manifest(options.model)
    model = served_model(options.model, manifest, limits_of(manifest, options))
    config = _app_config(options, model.limits)
    check_runtime(manifest, options)
    if config.api_key is None and dns_name(options.host) not in LOCAL_HOSTS:
        print(f"warning: other machines may reach {options.host}, and {KEY_VARIABLE} is not set", file=sys.stderr)
    metrics = Metrics()
    settings = {**runtime_settings(manifest, options), "expected": manifest}  # of every engine, whenever it is loaded
    load = partial(load_warm_engine, options.model.resolve(), model.limits, config.guidance_scale, settings)
    load_engine, session = _engines(load, options)
    pool = _make_pool(load_engine, metrics, options)
    with naming_options(capacity="--queue"):
        app = create_app(model, pool, metrics, config)
    if options.ray:
        listen(options.host, options.port).close()  # now and not when Ray has started
    with session:
        on_ready = partial(announce, has_page=config.page, opens=options.open)
        serve(pool, app, options.host, options.port, config.request_seconds, on_ready, config.keep_alive_seconds)
    return 0


def _check_packages() -> None:
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import python_multipart  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ToMeError(f"{error}. Serving needs: {install_command('serve')}") from error


def _app_config(options: argparse.Namespace, limits: Limits) -> AppConfig:
    """The application's configuration by the command line, and by the model where an option is absent.

    Raises:
        ToMeConfigError: an option has a value that is not allowed, or requests without fields would be refused.
    """
    own = read_defaults(options.model)
    with naming_options(
        request_seconds="--timeout",
        keep_alive_seconds="--keep-alive",
        body_bytes="--max-body",
        hosts="--host or --allow-host",
        origins="--allow-origin",
    ):
        config = AppConfig(
            api_key=os.environ.get(KEY_VARIABLE),  # an empty key is refused
            request_seconds=options.timeout,
            keep_alive_seconds=options.keep_alive,
            body_bytes=options.max_body,
            hosts=(options.host, *options.allow_host),
            origins=tuple(options.allow_origin),
            page=not options.no_page,
            prompts=own.prompts,
            any_model=options.any_model,
            **step_settings(options, own),
        )
        if config.steps > limits.steps:
            raise ToMeConfigError(
                f"--steps {config.steps} is not allowed: --max-steps is {limits.steps}. Lower the one or raise the "
                "other."
            )
        limits.checked(guidance_scale=config.guidance_scale)
    return config


def _make_pool(load: "LoadEngine", metrics: "Metrics", options: argparse.Namespace) -> "EnginePool":
    """The engines, which `load` makes, and their queue.

    Raises:
        ToMeConfigError: an option has a value that is not allowed.
    """
    from ..serving.pool import EnginePool
    from ..serving.queue import JobQueue

    min_engines, max_engines = replicas(options)
    with naming_options(max_batch="--batch", stuck_seconds="twice --timeout"):
        queue = JobQueue(metrics, options.queue, options.batch, options.batch_wait)
        return EnginePool(load, queue, metrics, min_engines, max_engines, stuck_seconds=2 * options.timeout)


def announce(url: str, has_page: bool = True, opens: bool = False) -> None:
    """Log that the server is ready and what is at its address, and open the page in a browser if it should be.

    Args:
        url: the address for a browser on this machine.
    """
    page = f"open {url} in a browser; " if has_page else ""
    logger.info("ready: %s%sopenapi.json describes the API", page, url)
    if opens:  # in a thread, because some browsers run until they are closed
        Thread(target=_open_page, args=(url,), daemon=True).start()


def _open_page(url: str) -> None:
    if not webbrowser.open(url):
        logger.warning("--open: this machine has no browser: open %s in one that reaches it", url)


def _engines(
    load: "Callable[[int | None], Engine]", options: argparse.Namespace
) -> "tuple[LoadEngine, AbstractContextManager[None]]":
    """What makes engines, in this process or on Ray, and the context in which it can.

    Args:
        load: loads an engine with the given number of threads.

    Raises:
        ToMeError: --ray, and Ray is not installed, or a number is not allowed.
    """
    if not options.ray:
        return lambda is_unwanted: load(options.threads), nullcontext()
    _, max_engines = replicas(options)
    cpus, gpus = options.replica_cpus, 1.0 if is_gpu(options.device) else 0.0
    if cpus is None:
        cpus = max(1.0, usable_cores() / max_engines) if options.ray_address is None else 1.0
    if not cpus >= 0.01:
        raise ToMeConfigError(f"--replica-cpus {cpus} is not allowed: it must be 0.01 or more")
    ray_engines = import_ray_engines()
    load_there = partial(load, options.threads or max(1, int(cpus)))
    session = ray_engines.ray_session(options.ray_address, max_engines * cpus, max_engines * gpus, shows_logs=True)
    return partial(ray_engines.RemoteEngine, load_there, cpus, gpus, 2 * options.timeout), session


def replicas(options: argparse.Namespace) -> tuple[int, int]:
    """The smallest and the largest number of engines; without --ray there is a single engine.

    Raises:
        ToMeConfigError: a number is not allowed.
    """
    if not options.ray:
        return 1, 1
    option, minimum = "--min-replicas", options.min_replicas
    if minimum is None:
        option, minimum = "--replicas", options.replicas
    if minimum < 1:
        raise ToMeConfigError(f"{option} {minimum} is not allowed: it must be 1 or more")
    if options.max_replicas is None:
        return minimum, max(minimum, options.replicas)
    if options.max_replicas < minimum:
        raise ToMeConfigError(
            f"--max-replicas {options.max_replicas} is not allowed: {option} is {minimum}. Raise the one or lower "
            "the other."
        )
    return minimum, options.max_replicas


def limits_of(manifest: Manifest, options: argparse.Namespace) -> Limits:
    """The limits by the export and the command line.

    Raises:
        ToMeConfigError: a --size was not exported, or a limit is not allowed.
    """
    with naming_options():
        sizes = tuple(parse_size(text) for text in options.size) if options.size else manifest.sizes
    for size in sizes:
        if size not in manifest.sizes:
            exported = ", ".join(map(str, manifest.sizes))
            raise ToMeConfigError(f"--size {size} was not exported: it must be one of {exported}")
    with naming_options(
        prompt_characters="--max-prompt", images="--max-images", steps="--max-steps", image_pixels="--max-pixels"
    ):
        return Limits(
            sizes=sizes,
            ratios=manifest.ratios,
            image_to_image=manifest.image_to_image,
            prompt_characters=options.max_prompt,
            images=options.max_images,
            steps=options.max_steps,
            image_pixels=options.max_pixels,
        )
