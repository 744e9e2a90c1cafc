"""Draw which keys and values `interlace` keeps: as dots in three steps, and how many in each step of an image.

    python benchmarks/patterns.py    # docs/interlace.svg and docs/steps.svg

Both show what the package chooses at the timesteps of these steps.
"""

from pathlib import Path

from samplers import FOUR, SETTINGS, timesteps_of

from ppdiffusers_tome import Grid
from ppdiffusers_tome.methods.interlace import PARTS, Interlace
from ppdiffusers_tome.methods.steps import PLAIN_STEPS
from ppdiffusers_tome.methods.turns import turn_table

OUTPUT = Path(__file__).parents[1] / "docs" / "interlace.svg"
STEPS = OUTPUT.with_name("steps.svg")
SCHEDULES = (FOUR["ddim-7.5"], FOUR["dpm-7.5"], SETTINGS["karras"], SETTINGS["pndm"])  # a row each
WIDTH, HEIGHT = 560, 44  # px of a row of bars
GRID = Grid(8, 8)
KEPT = (8, 4, 2)  # of PARTS, a row each
TIMESTEPS = {13: 351, 14: 301, 15: 251}  # three of 20 steps of DDIM, a column each
SPACING, RADIUS, MARGIN, TITLE = 16, 5, 28, 84  # px
STYLE = ".kept{fill:#3949ab}.other{fill:#dcdfe6}.plain{fill:#ef6c00}text{font:14px sans-serif;fill:#333}"


def kept_tokens(parts: int, timestep: int) -> set[int]:
    """The tokens whose keys and values remain in a block that keeps `parts` of each cell."""
    table = Interlace().constants(GRID, GRID.tokens * parts // PARTS, block=0)
    return set(table[turn_table()[timestep]].tolist())


def opening(width: int, height: int) -> list[str]:
    """The first lines of a picture of this size in px."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<style>{STYLE}</style>",
        '<rect width="100%" height="100%" fill="white"/>',
    ]


def draw() -> str:
    """The picture, as SVG."""
    width, height = GRID.w * SPACING + MARGIN, GRID.h * SPACING + MARGIN
    size = TITLE + len(TIMESTEPS) * width, MARGIN + len(KEPT) * height
    lines = opening(*size)
    for column, step in enumerate(TIMESTEPS):
        lines.append(f'<text x="{TITLE + column * width}" y="{MARGIN - 10}">step {step}</text>')
    for row, parts in enumerate(KEPT):
        top = MARGIN + row * height
        lines.append(f'<text x="12" y="{top + GRID.h * SPACING // 2}">{parts} of {PARTS}</text>')
        for column, timestep in enumerate(TIMESTEPS.values()):
            kept = kept_tokens(parts, timestep)
            for token in range(GRID.tokens):
                down, right = divmod(token, GRID.w)
                x, y = TITLE + column * width + right * SPACING, top + down * SPACING
                name = "kept" if token in kept else "other"
                lines.append(f'<circle class="{name}" cx="{x + RADIUS}" cy="{y + RADIUS}" r="{RADIUS}"/>')
    return "\n".join([*lines, "</svg>\n"])


def draw_steps() -> str:
    """The picture of the steps, as SVG: a bar for each step, as high as the share of the keys that remain."""
    row, left = HEIGHT + 2 * MARGIN, 12
    size = WIDTH + 2 * left, len(SCHEDULES) * row + MARGIN
    lines = opening(*size)
    for number, setting in enumerate(SCHEDULES):
        timesteps, bottom = timesteps_of(setting, setting.steps), (number + 1) * row
        plain = PLAIN_STEPS.count(timesteps)
        title = f"{setting.sampler}, {setting.steps} steps: {plain} of {len(timesteps)} passes keep all keys"
        lines.append(f'<text x="{left}" y="{bottom - HEIGHT - 10}">{title}</text>')
        width = WIDTH / len(timesteps)
        for step, timestep in enumerate(timesteps):
            is_plain = PLAIN_STEPS.count([timestep])
            height = HEIGHT if is_plain else HEIGHT * (1 - Interlace().effective_ratio)
            place = f'x="{left + step * width:.1f}" y="{bottom - height:.1f}"'
            box = f'{place} width="{width - 2:.1f}" height="{height:.1f}"'
            lines.append(f'<rect class="{"plain" if is_plain else "kept"}" {box}/>')
    lines.append(f'<text x="{left}" y="{size[1] - 8}">first step</text>')
    lines.append(f'<text x="{left + WIDTH}" y="{size[1] - 8}" text-anchor="end">last step</text>')
    return "\n".join([*lines, "</svg>\n"])


if __name__ == "__main__":
    OUTPUT.write_text(draw(), encoding="utf-8")
    STEPS.write_text(draw_steps(), encoding="utf-8")
