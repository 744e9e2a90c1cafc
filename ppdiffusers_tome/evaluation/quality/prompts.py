"""Which prompts are drawn: a file of them, gone through again with other seeds until there are enough."""

import csv
from collections.abc import Sequence
from pathlib import Path

from ...errors import ToMeConfigError
from ...generation.prompts import Defaults, read_prompts
from ...serving.jobs import LARGEST_SEED, Limits

COLUMN = "Prompt"  # of PartiPrompts' table


def read_texts(path: Path) -> list[str]:
    """The prompts of a file.

    Args:
        path: `.txt`, a prompt a line; `.jsonl`, an object with "prompt" a line; or `.tsv`, a table with a column
            "Prompt", as PartiPrompts (Yu et al. 2022, arXiv:2206.10789) are published.

    Raises:
        ToMeConfigError: it cannot be read, holds no prompt, or one that cannot be drawn (the message names the line).
    """
    if path.suffix != ".tsv":
        anything = Limits(((1, 1),), (0.0,), prompt_characters=100_000)
        return [prompt.job.prompt for prompt in read_prompts(path, Defaults(1, 1, 0.0), anything)]
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            table = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
            texts = [(row.get(COLUMN) or "").strip() for row in table]
    except (OSError, UnicodeDecodeError) as error:
        raise ToMeConfigError(f"{path} cannot be read: {error}") from error
    texts = [text for text in texts if text]
    if not texts:
        raise ToMeConfigError(f"{path} holds no prompt: its first line must name a column {COLUMN!r}.")
    return texts


def choose(texts: Sequence[str], count: int, seed: int) -> tuple[tuple[str, int], ...]:
    """(text, seed) of so many pictures: the texts in turn, again from the first after the last, each with a new seed.

    Raises:
        ToMeConfigError: count or seed is out of range.
    """
    if count < 1:
        raise ToMeConfigError(f"count={count!r} is not allowed: it must be 1 or more.")
    if not 0 <= seed <= LARGEST_SEED - count:
        raise ToMeConfigError(f"seed={seed!r} is not allowed: it must be 0 to {LARGEST_SEED - count}.")
    return tuple((texts[n % len(texts)], seed + n) for n in range(count))
