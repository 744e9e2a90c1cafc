"""Draw docs/methods.png, the method "default" on a photograph: python benchmarks/methods_figure.py"""

from pathlib import Path

import numpy as np
import paddle
from lab.plotting import ORANGE, make_figure, save_figure
from lab.quality.image_sets import photograph
from matplotlib.collections import LineCollection

from ppdiffusers_tome import Grid, MergePlan, ToMeConfig, match_tokens, merge, unmerge
from ppdiffusers_tome.attach.placement import tokens_kept

OUTPUT = Path(__file__).parents[1] / "docs" / "methods.png"
SIDE, PATCH = 32, 4  # tokens, and pixels of a token, along each side
GRID, CONFIG = Grid(SIDE, SIDE), ToMeConfig(0.5, "default")


def main() -> None:
    """Each token is a patch of pixels; it merges by their colours, as a token of a model merges by its channels."""
    image = np.asarray(photograph("chelsea", SIDE * PATCH), "float32") / 255
    patches = image.reshape(SIDE, PATCH, SIDE, PATCH, 3).transpose(0, 2, 1, 3, 4).reshape(1, GRID.tokens, -1)
    centred = patches - patches.mean(1, keepdims=True)
    removed, of_keys = (GRID.tokens - kept for kept in tokens_kept(CONFIG, GRID)[1:])
    plan = match_tokens(paddle.to_tensor(centred), GRID, removed, 2, 2, (0, 0), CONFIG.window, of_keys)
    figure, panels = make_figure(3, height=3.1)
    for axes, part, name in zip(
        panels, (None, plan, plan.keys), ("tokens", "queries", "keys and values"), strict=True
    ):
        tokens = paddle.to_tensor(patches)
        shown = tokens if part is None else unmerge(merge(tokens, part), part)
        pixels = shown.numpy().reshape(SIDE, SIDE, PATCH, PATCH, 3).transpose(0, 2, 1, 3, 4).reshape(image.shape)
        axes.imshow(pixels, extent=(0, SIDE, SIDE, 0), interpolation="nearest")
        axes.set_title(f"{name}: {GRID.tokens if part is None else part.kept}", fontsize=10)
        axes.set(xticks=[], yticks=[])
        axes.grid(visible=False)
        if part is not None:
            axes.add_collection(LineCollection(pairs_of(part), colors=ORANGE, linewidths=0.5))
            for line in range(CONFIG.window or SIDE, SIDE, CONFIG.window or SIDE):
                axes.axhline(line, color="white", lw=0.8)
                axes.axvline(line, color="white", lw=0.8)
    save_figure(figure, OUTPUT)


def pairs_of(plan: MergePlan) -> np.ndarray:
    """The lines [r, 2, 2] from each token that merges to its dst, as x and y of their centres."""
    places = plan.kept_rows.numpy().reshape(-1)[plan.source_rows.numpy()]
    src = np.flatnonzero(places != np.arange(GRID.tokens))
    ends = np.stack([src, places[src]], 1)
    return np.stack([ends % SIDE, ends // SIDE], -1) + 0.5


if __name__ == "__main__":
    main()
