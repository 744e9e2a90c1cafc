"""`serve`: an exported model over HTTP."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from ..errors import ToMeConfigError, ToMeError
from ..inference import Manifest, Runtime, parse_size, read_manifest
from ..serving.jobs import Job, Limits
from ..serving.settings import KEY_VARIABLE, Settings, key_from_environment

if TYPE_CHECKING:
    from ..serving.engine import Engine

LIMITS = {field.name: field.default for field in fields(Limits)}
DEFAULTS = {field.name: field.default for field in fields(Settings)}


def add(commands: argparse._SubParsersAction) -> None:
    """Add `serve` to the command line."""
    serve = commands.add_parser(
        "serve",
        help="serve an exported model over HTTP, to clients of OpenAI and of stable-diffusion-webui",
        description=f"The environment variable {KEY_VARIABLE} holds the key that clients must send; not set: none.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    serve.add_argument("--model", type=Path, required=True, help="folder that the command export wrote")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0 for all of this machine's")
    serve.add_argument("--port", type=int, default=8000, help="0 for one that is free")
    serve.add_argument(
        "--no-verify", dest="verify", action="store_false", help="do not compare the weights with their hashes"
    )
    serve.add_argument("--device", default="cpu", help="cpu or gpu")
    serve.add_argument("--threads", type=int, help="CPU threads; all cores if not given")
    serve.add_argument(
        "--sizes", help="WIDTHxHEIGHT,... to serve, the default first; all that were exported if not given"
    )
    serve.add_argument("--queue", type=int, default=64, help="most pictures that wait; beyond, clients get 429")
    serve.add_argument("--batch", type=int, default=4, help="most pictures in one pipeline call")
    serve.add_argument("--batch-wait", type=float, default=0.02, help="seconds to wait for others to draw with")
    serve.add_argument("--timeout", type=float, default=DEFAULTS["request_seconds"], help="seconds for one request")
    serve.add_argument("--steps", type=int, default=DEFAULTS["steps"], help="of requests that do not say")
    serve.add_argument("--guidance-scale", type=float, default=DEFAULTS["guidance_scale"], help="likewise")
    serve.add_argument("--max-images", type=int, default=LIMITS["images"], help="most pictures of one request")
    serve.add_argument("--max-steps", type=int, default=LIMITS["steps"], help="most steps")
    serve.add_argument("--max-prompt", type=int, default=LIMITS["prompt_characters"], help="characters of a prompt")
    serve.add_argument("--max-body", type=int, default=DEFAULTS["body_bytes"], help="largest request, bytes")
    serve.add_argument("--max-pixels", type=int, default=LIMITS["image_pixels"], help="largest picture of a client")
    ray = serve.add_argument_group("on several processes or machines, with Ray Serve (ppdiffusers_tome[ray])")
    ray.add_argument(
        "--ray", action="store_true", help="engines in processes of their own; those that die are replaced"
    )
    ray.add_argument("--replicas", type=int, default=1, help="how many engines; each loads the model")
    ray.add_argument("--min-replicas", type=int, help="with --max-replicas, in place of --replicas: as the load wants")
    ray.add_argument("--max-replicas", type=int, help="see --min-replicas")
    ray.add_argument(
        "--replica-cpus", type=float, help="what Ray sets aside for each; this machine's share if not given"
    )
    ray.add_argument("--ray-address", help="of a cluster; a Ray of this machine's own, at 127.0.0.1, if not given")
    serve.set_defaults(run=_serve)


def _serve(options: argparse.Namespace, given: Sequence[str]) -> int:
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ToMeError(f"{error}. Serving needs: pip install 'ppdiffusers_tome[serve]'") from error
    from ..serving.app import create_app
    from ..serving.metrics import Metrics
    from ..serving.queue import PictureQueue
    from ..serving.server import serve

    manifest = read_manifest(options.model)
    limits = limits_of(manifest, options)
    settings = Settings(
        api_key=key_from_environment(),
        request_seconds=options.timeout,
        body_bytes=options.max_body,
        steps=options.steps,
        guidance_scale=options.guidance_scale,
    )
    warm_up = warm_ups(limits, settings.guidance_scale)
    limits.check(replace(warm_up[0], steps=settings.steps))  # or requests that leave them out would all be refused
    # Raises here what it would where the model is loaded; only a machine of a Ray cluster knows what GPU it has.
    Runtime("cpu" if options.ray_address else options.device, options.threads)
    load = partial(_load, options.model.resolve(), warm_up, options.device, options.verify)
    if settings.api_key is None and options.host not in ("127.0.0.1", "::1", "localhost"):
        print(f"warning: {options.host} may be reached from elsewhere and {KEY_VARIABLE} is not set", file=sys.stderr)
    if options.ray:
        _serve_on_ray(load, manifest.name, limits, settings, options)
        return 0
    metrics = Metrics()
    load = partial(load, options.threads)
    queue = PictureQueue(
        load,
        manifest.name,
        limits,
        options.queue,
        options.batch,
        options.batch_wait,
        metrics,
        stuck_seconds=2 * options.timeout,
    )
    serve(queue, create_app(queue, settings, metrics), options.host, options.port, settings.request_seconds)
    return 0


def _load(folder: Path, warm_up: Sequence[Job], device: str, verify: bool, threads: int | None) -> "Engine":
    from ..serving.engine import load_engine

    engine = load_engine(folder, device, threads, verify)
    for job in warm_up:  # ready means: it has drawn
        engine.generate([job])
    return engine


def warm_ups(limits: Limits, guidance_scale: float) -> list[Job]:
    """One small job for each program of the model.

    A predictor is made when it is first used, and Paddle holds Python's lock for seconds meanwhile, in which nobody
    would be answered: let that be before the server is ready.
    """
    jobs = [
        Job("", height, width, ratio, seed=0, steps=2, guidance_scale=guidance_scale)
        for height, width in limits.sizes
        for ratio in limits.ratios
    ]
    if limits.image_to_image:
        jobs.append(replace(jobs[0], image=Image.new("RGB", (jobs[0].width, jobs[0].height)), strength=1.0))
    return jobs


def _serve_on_ray(
    load: "Callable[[int], Engine]", name: str, limits: Limits, settings: Settings, options: argparse.Namespace
) -> None:
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise ToMeError(f"{error}. --ray needs: pip install 'ppdiffusers_tome[ray]'") from error
    from ..serving.cluster import deploy, serve_until_told
    from ..serving.replicas import Cluster

    smallest = options.replicas if options.min_replicas is None else options.min_replicas
    largest = max(smallest, options.replicas) if options.max_replicas is None else options.max_replicas
    cpus = options.replica_cpus
    if cpus is None:
        cpus = max(1.0, (os.cpu_count() or 1) / max(1, largest)) if options.ray_address is None else 1.0
    cluster = Cluster(
        min_replicas=smallest,
        max_replicas=largest,
        cpus=cpus,
        gpus=1.0 if options.device.startswith("gpu") else 0.0,
        largest_batch=options.batch,
        batch_wait=options.batch_wait,
        capacity=options.queue,
        stuck_seconds=2 * options.timeout,
        drain_seconds=options.timeout,
    )
    load = partial(load, options.threads or max(1, int(cpus)))
    start = partial(deploy, load, name, limits, settings, cluster)
    serve_until_told(start, options.ray_address, cluster, options.host, options.port)


def limits_of(manifest: Manifest, options: argparse.Namespace) -> Limits:
    """The limits that a folder and the command line set together.

    Raises:
        ToMeConfigError: --sizes names one that was not exported, is missing where any size was, or a limit is wrong.
    """
    sizes = tuple(parse_size(text) for text in options.sizes.split(",")) if options.sizes else manifest.sizes
    if not sizes:
        raise ToMeConfigError("the model was exported for any size: tell which ones to serve, --sizes 512x512 for one")
    for size in sizes:
        if manifest.sizes and size not in manifest.sizes:
            listed = ", ".join(map(str, manifest.sizes))
            raise ToMeConfigError(f"--sizes {size} was not exported: there is {listed}")
    return Limits(
        sizes=sizes,
        ratios=manifest.ratios,
        image_to_image=manifest.image_to_image,
        prompt_characters=options.max_prompt,
        images=options.max_images,
        steps=options.max_steps,
        image_pixels=options.max_pixels,
    )
