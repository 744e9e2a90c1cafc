"""Images as bytes: PNG files that record how they were made, and the decoding of images from clients."""

import base64
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image, ImageOps, PngImagePlugin, UnidentifiedImageError

from .._version import __version__
from ..run.sizes import Size
from .image_engine import ImageSource
from .jobs import Job, JobError
from .limits import Limits

ACCEPTED = ("PNG", "JPEG", "WEBP")
# A name and its value in a line of them, which is matched and not searched: that would take minutes for a megabyte.
FACT = re.compile(r'[ ]*(\w[^:,"]*):[ ]*("(?:[^"\\]|\\.)*"|[^,]*)(?:,|$)')
WHITESPACE = " \t\r\n\f\v"
MAX_SCANS = 100  # of a JPEG; usual ones have about ten. Files of a few KB with thousands take minutes to decode


def describe(job: Job, source: ImageSource) -> str:
    """Describe how an image was made, in the format of stable-diffusion-webui ("infotext")."""
    facts: dict[str, Any] = {
        "Steps": job.steps,
        "Sampler": source.sampler,
        "CFG scale": job.guidance_scale,
        "Seed": job.seed,
        "Size": job.size,
        "Model": source.name,
    }
    if job.strength is not None:
        facts["Denoising strength"] = job.strength
    facts |= describe_merging(job, source)
    facts["Version"] = f"ppdiffusers_tome {__version__}"
    negative = f"\nNegative prompt: {job.negative_prompt}" if job.negative_prompt else ""
    return f"{job.prompt}{negative}\n{', '.join(f'{name}: {_quoted(str(value))}' for name, value in facts.items())}"


def parse_infotext(text: str) -> dict[str, str]:
    """The facts in a text by `describe` or stable-diffusion-webui; a size as two, such as `Size-1` and `Size-2`."""
    *prompt, last = text.strip().split("\n")
    facts: dict[str, str] = {}
    end = 0
    while end < len(last):
        pair = FACT.match(last, end)
        end = pair.end() if pair else (last.find(",", end) + 1 or len(last))
        if pair:
            name, value = pair.groups()
            size = re.fullmatch(r"(\d+)x(\d+)", value)
            facts |= {f"{name}-1": size[1], f"{name}-2": size[2]} if size else {name: _unquoted(value)}
    if len(facts) < 3:  # the last line is one of the prompt
        prompt, facts = [*prompt, last], {}
    first, _, negative = "\n".join(["", *prompt]).partition("\nNegative prompt:")
    return {"Prompt": first.strip(), "Negative prompt": negative.strip(), **facts}


def describe_merging(job: Job, source: ImageSource) -> dict[str, Any]:
    """Describe how tokens merge, and the second pass, in stable-diffusion-webui's terms."""
    facts: dict[str, Any] = {"Token merging ratio": job.ratio}
    method = source.methods.get(job.ratio, "")
    if method:
        facts["Token merging method"] = method
    second = job.second_pass
    if second is not None:
        facts["Denoising strength"] = second.strength
        facts["Hires resize"] = str(second.size)
        facts["Hires steps"] = second.steps
        facts["Hires upscaler"] = "Lanczos"
        facts["Token merging ratio hr"] = second.ratio
    return facts


def encode_png(image: Image.Image, job: Job, source: ImageSource) -> bytes:
    """A PNG file with two text chunks: `parameters` (see `describe`), and `ppdiffusers_tome`, the same as JSON."""
    chunks = PngImagePlugin.PngInfo()
    chunks.add_text("parameters", describe(job, source))
    method = source.methods.get(job.ratio, "")
    metadata = {**job.settings(), "tome_method": method, "model": source.name, "sampler": source.sampler}
    metadata["version"] = __version__
    chunks.add_text("ppdiffusers_tome", json.dumps(metadata))
    file = BytesIO()
    image.save(file, "PNG", pnginfo=chunks)
    return file.getvalue()


def load_image(source: str | bytes, size: Size, limits: Limits) -> Image.Image:
    """Decode a client's image: RGB, upright by its EXIF data, resized, white where it is transparent.

    Args:
        source: a PNG, JPEG or WEBP file, as bytes, or as text in base64 with or without "data:image/png;base64,"
            before it and with or without whitespace in it. URLs and file names are not read.
        size: of the result.
        limits: has the limits of pixels, sides and aspect. They are checked before the image is decoded.

    Raises:
        JobError: the image is malformed, of a different format or too large; the field is `image`.
    """
    with _opened(source, limits) as image:
        return upright_rgb(image).resize((size.width, size.height), Image.Resampling.LANCZOS)


def read_texts(source: str | bytes, limits: Limits) -> dict[str, str]:
    """The texts in a client's image by name, such as those of `encode_png`.

    Args:
        source, limits: see `load_image`.

    Raises:
        JobError: see `load_image`.
    """
    with _opened(source, limits) as image:
        return {name: text for name, text in image.info.items() if isinstance(name, str) and isinstance(text, str)}


@contextmanager
def _opened(source: str | bytes, limits: Limits) -> Iterator[Image.Image]:
    """A client's image, which is decoded in this context, if it is at all."""
    data = source if isinstance(source, bytes) else _from_base64(source)
    try:
        image = Image.open(BytesIO(data), formats=ACCEPTED)
        _check_header(image, data, limits)
        yield image
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise JobError("image", f"it is too large: {limits.image_pixels} pixels are allowed") from None
    except UnidentifiedImageError:
        raise JobError("image", f"it is none of {', '.join(ACCEPTED)}, or its header is broken") from None
    except (JobError, MemoryError):
        raise
    except Exception as error:  # Pillow's decoders raise nearly anything on broken files
        raise JobError("image", f"it is broken: {type(error).__name__}") from error


def _from_base64(text: str) -> bytes:
    """The bytes that a text holds in base64. MIME, Ruby, Android and Python's `encodebytes` break it into lines."""
    text = text.lstrip(WHITESPACE)
    start = text[:64]
    encoded = text.partition(",")[2] if start.startswith("data:image/") and ";base64," in start else text
    try:
        return base64.b64decode(encoded.encode("ascii").translate(None, WHITESPACE.encode()), validate=True)
    except ValueError:
        raise JobError("image", "it is not base64: send the bytes of a PNG, JPEG or WEBP file in base64") from None


def _check_header(image: Image.Image, data: bytes, limits: Limits) -> None:
    short, long = sorted(image.size)
    if short * long > limits.image_pixels or long > limits.image_side or long > limits.image_aspect * short:
        allowed = f"at most {limits.image_pixels} pixels, sides of {limits.image_side}, 1:{limits.image_aspect:g}"
        raise JobError("image", f"{Size(image.height, image.width)} is too large or too narrow: {allowed}")
    if image.format == "JPEG" and data.count(b"\xff\xda") > MAX_SCANS:
        raise JobError("image", f"it has more than {MAX_SCANS} scans, each of which costs as much as an image")


def upright_rgb(image: Image.Image) -> Image.Image:
    """The image in RGB of 8 bits, upright by its EXIF data, white where it is transparent."""
    ImageOps.exif_transpose(image, in_place=True)
    if image.mode.startswith("I"):  # 16-bit gray, which Pillow would clip at 255
        image = Image.fromarray(np.round(np.asarray(image) / 257).clip(0, 255).astype(np.uint8))
    if not image.has_transparency_data:
        return image.convert("RGB")
    white = Image.new("RGBA", image.size, "white")
    white.alpha_composite(image.convert("RGBA"))
    return white.convert("RGB")


def _unquoted(value: str) -> str:
    """The inverse of `_quoted`."""
    try:
        return json.loads(value) if value.startswith('"') else value
    except ValueError:
        return value


def _quoted(value: str) -> str:
    """The value in quotation marks where a comma, colon or line break would end it, as stable-diffusion-webui does."""
    return json.dumps(value, ensure_ascii=False) if any(mark in value for mark in ",:\n") else value
