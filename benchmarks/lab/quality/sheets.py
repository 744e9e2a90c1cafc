"""Sheets of the images that `alternatives.py` generated."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ppdiffusers_tome.comparison.sheets import make_sheet, save_jpeg
from ppdiffusers_tome.errors import ToMeConfigError

SHOWN = 6  # images of each arm on a sheet


def write_sheet(
    path: Path,
    result: dict[str, Any],
    images: Path,
    folders: dict[str, str],
    titles: dict[int, str],
) -> Path:
    """Write a sheet of generated images, a row for each arm, as a JPEG.

    Args:
        path: the JPEG to write.
        result: of `alternatives.py`.
        images: the folder that contains the folder "images".
        folders: the label of each row → the name of its arm.
        titles: the number of each image → the title of its column.

    Raises:
        ToMeConfigError: an arm has more or fewer images than the result.
    """
    rows: list[tuple[str, list[Image.Image]]] = []
    for label, name in folders.items():
        folder, count = images / "images" / name, len(result["prompts"])
        files = sorted(folder.glob("[!.]*.png"))  # without unfinished ones
        if len(files) != count:
            raise ToMeConfigError(f"{folder} has {len(files)} images, the result {count}.")
        rows.append((label, [Image.open(files[n]).convert("RGB") for n in titles]))
    sheet = make_sheet(rows, list(titles.values()), min(result["size"], 256))
    about = {key: result[key] for key in ("model", "steps", "guidance_scale", "strength", "command", "commit")}
    return save_jpeg(sheet, path, prompts=[result["prompts"][n] for n in titles], rows=list(folders), **about)


def evenly_spaced(result: dict[str, Any]) -> dict[int, str]:
    """The numbers of the images of a result that a sheet shows, each with its prompt."""
    prompts = result["prompts"]
    numbers = sorted({round(n) for n in np.linspace(0, len(prompts) - 1, SHOWN).tolist()})
    return {n: prompts[n]["prompt"] for n in numbers}
