"""The figures of docs/methods.md: what each method merges in one photograph, by the library's own plans.

    python benchmarks/method_figures.py

writes docs/methods_*.png. Tokens are the 24×24 patches of a photograph, compared by their colours.
"""

from pathlib import Path

import numpy as np
import paddle
from matplotlib.axes import Axes

from ppdiffusers_tome import Grid, match_cells, match_tokens, merge, unmerge
from ppdiffusers_tome.evaluation.plotting import BLUE, GREY, ORANGE, RED, make_figure, save_figure
from ppdiffusers_tome.evaluation.quality.image_sets import photograph
from ppdiffusers_tome.matching import MergePlan

SIDE, PATCH = 24, 4  # tokens along each axis, pixels along each side of a token
WINDOW = 8
KEY = (0, 0)  # of the random dst
DOCS = Path(__file__).parents[1] / "docs"


def draw_tokens(axes: Axes, tokens: paddle.Tensor, title: str) -> None:
    """Draw tokens [1, N, PATCH·PATCH·3] at their places in the image."""
    patches = tokens.numpy().reshape(SIDE, SIDE, PATCH, PATCH, 3).transpose(0, 2, 1, 3, 4)
    image = np.clip(patches.reshape(SIDE * PATCH, SIDE * PATCH, 3), 0, 1)
    axes.imshow(image, extent=(0, SIDE, SIDE, 0), interpolation="nearest")
    axes.set_title(title, fontsize=10)
    axes.set(xticks=[], yticks=[])
    axes.grid(False)


def draw_links(axes: Axes, plan: MergePlan, has_sizes: bool = False) -> None:
    """Draw a dot on each dst and a line to it from each token that merges; or only dots, with the sizes as areas."""
    rows, columns = np.divmod(np.arange(SIDE * SIDE), SIDE)
    dst = plan.dst_rows.numpy()
    targets = dst[plan.target_rows.numpy().reshape(-1)]
    for source, target in [] if has_sizes else zip(plan.merged_rows.numpy(), targets, strict=True):
        ends = [source, target]
        axes.plot(columns[ends] + 0.5, rows[ends] + 0.5, color=ORANGE, linewidth=0.6)
    sizes = 1 / plan.weights.numpy().reshape(-1)
    area = 5.0 * sizes if has_sizes else 3.0
    axes.scatter(columns[dst] + 0.5, rows[dst] + 0.5, s=area, color=RED if has_sizes else BLUE, zorder=3, linewidths=0)
    axes.set(xlim=(0, SIDE), ylim=(SIDE, 0))


def draw_lines(axes: Axes, step: int) -> None:
    """Draw the borders of windows or cells."""
    for place in range(step, SIDE, step):
        axes.axhline(place, color=GREY, linewidth=0.5)
        axes.axvline(place, color=GREY, linewidth=0.5)


def main() -> None:
    pixels = np.asarray(photograph("chelsea", SIDE * PATCH), "float32") / 255
    patches = pixels.reshape(SIDE, PATCH, SIDE, PATCH, 3).transpose(0, 2, 1, 3, 4).reshape(1, SIDE * SIDE, -1)
    tokens, grid = paddle.to_tensor(patches), Grid(SIDE, SIDE)
    half, three_quarters = SIDE * SIDE // 2, SIDE * SIDE * 3 // 4
    centred = tokens - tokens.mean(axis=1, keepdim=True)  # colours are positive, so their cosines differ little
    whole = match_tokens(centred, grid, half, random_key=KEY)
    windows = match_tokens(centred, grid, half, random_key=KEY, window=WINDOW)
    keys = match_tokens(centred, grid, three_quarters, random_key=KEY, window=WINDOW)
    cells = match_cells(centred, grid)

    def merged(plan: MergePlan, blend: float = 1.0) -> paddle.Tensor:
        return unmerge(merge(tokens, plan, blend), plan)

    for name, panels in {
        "tome": [("all 576 tokens", tokens, None, 0), ("288 remain", merged(whole), whole, 0)],
        "proportional": [("288 remain", merged(whole), None, 0), ("dots: how often each counts", tokens, whole, 0)],
        "window": [("in the whole grid", merged(whole), whole, 0), ("in windows of 8×8", merged(windows), windows, 8)],
        "kv": [("queries: all 576", tokens, None, 0), ("keys and values: 144", merged(keys), keys, WINDOW)],
        "grid": [("each cell by its dst: 144", merged(cells, 0.0), None, 2), ("by its mean", merged(cells), None, 2)],
    }.items():
        figure, axes = make_figure(columns=2)
        for panel, (title, shown, plan, step) in zip(axes, panels, strict=True):
            draw_tokens(panel, shown, title)
            if step:
                draw_lines(panel, step)
            if plan is not None:
                draw_links(panel, plan, has_sizes=name == "proportional")
        save_figure(figure, DOCS / f"methods_{name}.png")


if __name__ == "__main__":
    main()
