"""Write the images that the bundled model was trained on, to compare generated ones with.

    python -m venv reference && reference/bin/pip install resvg-py==0.5.0 pillow==11.0.0
    reference/bin/python examples/scenes_sd/training/reference_images.py --output FOLDER

FOLDER then has 218 PNG files of 128×128 px, two for each of 109 concepts, named by their prompts. Their sources are
three npm packages of 20 MB, which are downloaded once into FOLDER/.packages and checked against their hashes. The
images equal those of examples/emoji_sd/training/make_dataset.py in all pixels. Licences: examples/emoji_sd/README.md.
"""

import argparse
import base64
import hashlib
import io
import json
import tarfile
import urllib.request
from pathlib import Path

import resvg_py
from PIL import Image

REGISTRY = "https://registry.npmjs.org"
PACKAGES = {  # (name, version): SHA-512 from the registry
    ("@lobehub/fluent-emoji-3d", "1.1.0"): (
        "Wlq2lVStTnr8BDpIJ0pEnTKO4LuDxxqTEhTvRtD1DLRF0me7ogeRQjKoehDHXuVJ2Qaecgl5wRBv60lUAG3h7g=="
    ),
    ("@iconify-json/twemoji", "1.2.5"): (
        "uKpuIEV0v6K5BW3Mjdyl+XKFVAbbcPxAgifKvEMtZoUZB5+YiY5zaMm2uNNCxyXzAWU9yNLlj41WU6/mvgALsw=="
    ),
    ("@iconify-json/noto", "1.2.9"): (
        "DQiuXENbun41ch+XPSV55H9FaWKpHTyz46YIKtSaKYD4fIDDzL1tR6H4np/T38jfrTAeI3rcKF0mqHYeZVAuaw=="
    ),
}
CONCEPTS = Path(__file__).parents[1] / "examples" / "emoji_sd" / "training" / "concepts.txt"


def fetch(folder):
    """Yield the packages as open archives, in the order of PACKAGES; downloads those that the folder lacks."""
    folder.mkdir(parents=True, exist_ok=True)
    for (name, version), digest in PACKAGES.items():
        file = f"{name.rpartition('/')[2]}-{version}.tgz"
        if not (folder / file).exists():
            with urllib.request.urlopen(f"{REGISTRY}/{name}/-/{file}", timeout=300) as answer:
                (folder / file).write_bytes(answer.read())
        content = (folder / file).read_bytes()
        if base64.b64encode(hashlib.sha512(content).digest()).decode() != digest:
            raise SystemExit(f"{folder / file} is not {name} {version}: its SHA-512 differs. Delete it and try again.")
        yield tarfile.open(fileobj=io.BytesIO(content))  # noqa: SIM115 (in memory, used until the program ends)


def code_of(file):
    """The code points in a file name, without the variation selector for colour, which not all packages write."""
    return file.replace("-fe0f", "").replace(".webp", "")


def render_icon(icons, name, size):
    """A vector icon of an Iconify set as an RGBA image."""
    icon = icons["icons"][name]
    width, height = (icon.get(side, icons.get(side, 16)) for side in ("width", "height"))
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="{icon.get("left", 0)} {icon.get("top", 0)} {width} {height}" '
        f'width="{size}" height="{size}">{icon["body"]}</svg>'
    )
    png = bytes(resvg_py.svg_to_bytes(svg_string=svg, width=size, height=size))
    return Image.open(io.BytesIO(png)).convert("RGBA")


def on_white(image, size):
    """The image scaled into a white square with a margin of a sixteenth."""
    margin = size // 16
    page = Image.new("RGBA", (size, size), (255,) * 4)
    inner = image.resize((size - 2 * margin,) * 2, Image.Resampling.LANCZOS)
    page.alpha_composite(inner, (margin, margin))
    return page.convert("RGB")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for the images")
    parser.add_argument("--size", type=int, default=128, help="px per side (default: %(default)s)")
    options = parser.parse_args()
    fluent, twemoji, noto = fetch(options.output / ".packages")
    files = {code_of(Path(entry.name).name): entry for entry in fluent if entry.name.endswith(".webp")}
    icons = json.load(twemoji.extractfile("package/icons.json"))
    codes = {}
    for code, name in json.load(noto.extractfile("package/chars.json")).items():
        codes.setdefault(name, code_of(code))
    for concept in CONCEPTS.read_text(encoding="utf-8").split():
        full = (options.size,) * 2
        render = Image.open(fluent.extractfile(files[codes[concept]])).convert("RGBA")
        for style, image in (
            ("a 3d render of", render.resize(full, Image.Resampling.LANCZOS)),
            ("a flat drawing of", render_icon(icons, concept, options.size)),
        ):
            on_white(image, options.size).save(options.output / f"{style} {concept.replace('-', ' ')}.png")
    print(f"{len(list(options.output.glob('*.png')))} images in {options.output}")


if __name__ == "__main__":
    main()
