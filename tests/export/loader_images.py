"""Images of a folder in one of the libraries of `benchmarks/loaders.py`: run by `test_diffusers_layout_loaders.py`.

loader_images.py FOLDER LOADER CLASS JOB OUTPUT: JOB is an `.npz` file with `noise_0`, `noise_1`, …, `settings` as
JSON, and for an image as input `image` and `mask_image`; OUTPUT is an `.npy` file.
"""

import json
import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import loaders


def main(folder: str, loader: str, class_name: str, job: str, output: str) -> None:
    with np.load(job) as arrays:
        settings = json.loads(str(arrays["settings"]))
        noise = [arrays[name] for name in sorted(arrays) if name.startswith("noise_")]
        inputs = {name: arrays[name] for name in ("image", "mask_image") if name in arrays}
    pipe = loaders.load(loader, Path(folder), class_name)
    np.save(output, loaders.generate(pipe, noise=noise, **settings, **inputs))


if __name__ == "__main__":
    main(*sys.argv[1:])
