"""What comparison.py makes of pictures: how alike two are, all on one sheet, and what a PNG says of itself."""

import json
import textwrap

import numpy as np

# Pillow has to come before Paddle: Paddle 2.6 brings a zlib along that breaks a later Pillow's PNGs.
from PIL import Image, ImageDraw, ImageFont, PngImagePlugin
from skimage.metrics import peak_signal_noise_ratio, structural_similarity


def likeness(plain, merged) -> tuple[float, float]:
    """PSNR in dB, infinite for equal pictures, and SSIM; means over the pairs."""
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(plain, merged, strict=True)]
    with np.errstate(divide="ignore"):
        psnr = [peak_signal_noise_ratio(a, b, data_range=255) for a, b in pairs]
    ssim = [structural_similarity(a, b, data_range=255, channel_axis=-1) for a, b in pairs]
    return float(np.mean(psnr)), float(np.mean(ssim))


def make_sheet(rows, prompts, size) -> Image.Image:
    """One row for each (label, caption, images), one column for each prompt."""
    font, left, gap = ImageFont.load_default(13), 56, 4
    titles = ["\n".join(textwrap.wrap(prompt, max(size // 7, 8))) for prompt in prompts]
    top = 8 + 16 * max(title.count("\n") + 1 for title in titles)
    picture = Image.new("RGB", (left + len(prompts) * (size + gap), top + len(rows) * (size + gap)), "white")
    pen = ImageDraw.Draw(picture)
    for x, title in enumerate(titles):
        pen.text((left + x * (size + gap), 4), title, "black", font)
    for y, (label, caption, images) in enumerate(rows):
        pen.text((4, top + y * (size + gap)), f"{label}\n{caption}", "black", font)
        for x, image in enumerate(images):
            picture.paste(image, (left + x * (size + gap), top + y * (size + gap)))
    return picture


def metadata(**fields) -> PngImagePlugin.PngInfo:
    """The fields as a PNG's text; what is not text as JSON."""
    info = PngImagePlugin.PngInfo()
    for key, value in fields.items():
        info.add_text(key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    return info
