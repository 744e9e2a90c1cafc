"""`families`: which of ppdiffusers' pipelines support merging."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from ..published.families import format_markdown, format_text, pipeline_support


def add(commands: argparse._SubParsersAction) -> None:
    """Add `families` to the command line."""
    families = commands.add_parser(
        "families", help="list which of ppdiffusers' pipelines support merging, and why others do not"
    )
    page = Path("docs/families.md")
    families.add_argument("--markdown", type=Path, nargs="?", const=page, help=f"also write the table to {page}")
    families.set_defaults(run=_families)


def _families(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    table = pipeline_support()
    print(format_text(table))
    if options.markdown:
        options.markdown.parent.mkdir(parents=True, exist_ok=True)
        options.markdown.write_text(format_markdown(table), encoding="utf-8")
    return 0
