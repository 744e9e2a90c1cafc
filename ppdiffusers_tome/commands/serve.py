"""`serve`: an exported model over HTTP."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from ..errors import ToMeConfigError, ToMeError
from ..inference import Manifest, parse_size, read_manifest
from ..serving.jobs import Job, Limits
from ..serving.settings import KEY_VARIABLE, Settings, key_from_environment

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
    serve.set_defaults(run=_serve)


def _serve(options: argparse.Namespace, given: Sequence[str]) -> int:
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ToMeError(f"{error}. Serving needs: pip install 'ppdiffusers_tome[serve]'") from error
    from ..serving.app import create_app
    from ..serving.engine import Engine, load_engine
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
    height, width = limits.sizes[0]
    first = Job("", height, width, limits.ratios[0], seed=0, steps=2, guidance_scale=settings.guidance_scale)

    def load() -> Engine:
        engine = load_engine(options.model, options.device, options.threads)
        engine.generate([first])  # ready means: it has drawn a picture
        return engine

    metrics = Metrics()
    queue = PictureQueue(load, manifest.name, limits, options.queue, options.batch, options.batch_wait, metrics)
    if settings.api_key is None and options.host not in ("127.0.0.1", "::1", "localhost"):
        print(f"warning: {options.host} may be reached from elsewhere and {KEY_VARIABLE} is not set", file=sys.stderr)
    serve(queue, create_app(queue, settings, metrics), options.host, options.port)
    return 0


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
