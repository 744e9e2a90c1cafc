"""Make the captioned images from three npm packages, unpacked under $EMOJI_SRC.

    python make_dataset.py SIZE

Writes data_SIZE.npz and captions.json to $EMOJI_WORK.
"""

import io
import json
import os
import sys
from pathlib import Path

import numpy as np
import resvg_py
from PIL import Image

SRC, WORK, S = os.environ.get("EMOJI_SRC", "src"), os.environ.get("EMOJI_WORK", "work"), int(sys.argv[1])
CATEGORIES = ["Animals & Nature", "Food & Drink", "Activities", "Travel & Places", "Objects", "Smileys & Emotion"]


def iconify(name):
    def read(f):
        return json.loads(Path(f"{SRC}/iconify-json-{name}/package/{f}.json").read_text())

    return read("icons"), read("chars"), read("metadata")


def render(icons, name):
    i = icons["icons"][name]
    w = i.get("width", icons.get("width", 16))
    h = i.get("height", icons.get("height", 16))
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="{i.get("left", 0)} {i.get("top", 0)} {w} {h}" '
        f'width="{S}" height="{S}">{i["body"]}</svg>'
    )
    return Image.open(io.BytesIO(bytes(resvg_py.svg_to_bytes(svg_string=svg, width=S, height=S)))).convert("RGBA")


def on_white(im):
    m = S // 16
    page = Image.new("RGBA", (S, S), (255,) * 4)
    page.alpha_composite(im.resize((S - 2 * m, S - 2 * m), Image.LANCZOS), (m, m))
    return np.asarray(page.convert("RGB"))


def plain(s):
    return s.replace("-fe0f", "").replace(".webp", "")


noto, code_of, meta = iconify("noto-1.2.9")
twemoji, _, _ = iconify("twemoji-1.2.5")
code = {}
for c, n in code_of.items():
    code.setdefault(n, plain(c))
fluent = {plain(f): f"{SRC}/fe3d/package/assets/{f}" for f in os.listdir(f"{SRC}/fe3d/package/assets")}
images, rows, seen = [], [], set()
for cat in CATEGORIES:
    for n in meta["categories"][cat]:
        if n in seen or n not in twemoji["icons"] or n not in noto["icons"] or code.get(n) not in fluent:
            continue
        seen.add(n)
        for style, im in (
            ("a 3d render of", Image.open(fluent[code[n]]).convert("RGBA").resize((S, S), Image.LANCZOS)),
            ("a flat drawing of", render(twemoji, n)),
            ("a cartoon of", render(noto, n)),
        ):
            images.append(on_white(im))
            rows.append({"caption": f"{style} {n.replace('-', ' ')}", "concept": n, "category": cat})
np.savez(f"{WORK}/data_{S}.npz", x=np.stack(images))
Path(f"{WORK}/captions.json").write_text(json.dumps(rows, indent=0))
print(len(images), "images of", len(seen), "concepts")
