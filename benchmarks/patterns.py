"""Draw which keys and values `interlace` keeps in the first steps of an image, as dots (`docs/interlace.svg`).

    python benchmarks/patterns.py

The dots are what the package chooses at the timesteps of these steps.
"""

from pathlib import Path

import paddle

from ppdiffusers_tome import Grid, ToMeConfig
from ppdiffusers_tome.methods.interlace import INTERLACE, PARTS
from ppdiffusers_tome.methods.turns import Turn, turn_at, turn_table

OUTPUT = Path(__file__).parents[1] / "docs" / "interlace.svg"
GRID = Grid(8, 8)
KEPT = (8, 4, 2)  # of PARTS, a row each
TIMESTEPS = (951, 901, 851)  # the first three of 20 steps of DDIM, a column each
SPACING, RADIUS, MARGIN, TITLE = 16, 5, 28, 84  # px
STYLE = ".kept{fill:#3949ab}.other{fill:#dcdfe6}text{font:14px sans-serif;fill:#333}"


def kept_tokens(parts: int, timestep: int) -> set[int]:
    """The tokens whose keys and values remain in a block that keeps `parts` of each cell."""
    settings, kept = ToMeConfig(), GRID.tokens * parts // PARTS
    constants = INTERLACE.constants(GRID, settings, kept, block=0)
    turn = Turn(turn_at(paddle.to_tensor([timestep]), turn_table()))
    return set(INTERLACE.choose(paddle.zeros([1, GRID.tokens, 1]), constants, kept, turn).positions.flatten().tolist())


def draw() -> str:
    """The picture, as SVG."""
    width, height = GRID.w * SPACING + MARGIN, GRID.h * SPACING + MARGIN
    size = TITLE + len(TIMESTEPS) * width, MARGIN + len(KEPT) * height
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="{0}" height="{1}" viewBox="0 0 {0} {1}">'.format(*size),
        f"<style>{STYLE}</style>",
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for column in range(len(TIMESTEPS)):
        lines.append(f'<text x="{TITLE + column * width}" y="{MARGIN - 10}">step {column + 1}</text>')
    for row, parts in enumerate(KEPT):
        top = MARGIN + row * height
        lines.append(f'<text x="12" y="{top + GRID.h * SPACING // 2}">{parts} of {PARTS}</text>')
        for column, timestep in enumerate(TIMESTEPS):
            kept = kept_tokens(parts, timestep)
            for token in range(GRID.tokens):
                down, right = divmod(token, GRID.w)
                x, y = TITLE + column * width + right * SPACING, top + down * SPACING
                name = "kept" if token in kept else "other"
                lines.append(f'<circle class="{name}" cx="{x + RADIUS}" cy="{y + RADIUS}" r="{RADIUS}"/>')
    return "\n".join([*lines, "</svg>\n"])


if __name__ == "__main__":
    OUTPUT.write_text(draw(), encoding="utf-8")
