"""Read Markdown documents for the tests: tables, prose, commands, links and anchors."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMMANDS = ("compare", "export", "generate", "serve")


def documents(*patterns: str) -> list[str]:
    """The documents that match, as seen from the root."""
    return sorted(path.relative_to(ROOT).as_posix() for pattern in patterns for path in ROOT.glob(pattern))


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def tables(document: str) -> list[list[list[str]]]:
    """The tables of a document, as `tables_in`."""
    return tables_in(text_of(document))


def tables_in(text: str) -> list[list[list[str]]]:
    """Rows of cells, the header first, without the line below it."""
    result: list[list[list[str]]] = []
    previous = ""
    for line in text.splitlines():
        if line.startswith("|"):
            if not previous.startswith("|"):
                result.append([])
            result[-1].append([cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")])
        previous = line
    return [[header, *rows] for header, _, *rows in result]


def prose(document: str) -> str:
    """The text in one line, without code blocks and tables."""
    text = re.sub(r"^```.*?^```$", "", text_of(document), flags=re.DOTALL | re.MULTILINE)
    return " ".join(" ".join(line for line in text.splitlines() if not line.startswith("|")).split())


def commands(document: str) -> Iterator[list[str]]:
    """The words of each command in blocks of shell code and in inline code; a bare `serve …` is this package's."""
    text = text_of(document)
    blocks = "\n".join(re.findall(r"^```bash\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)).replace("\\\n", " ")
    inline = re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))
    for line in [*blocks.splitlines(), *(" ".join(code.split()) for code in inline)]:
        for part in line.split("&&"):
            first = part.split()[0] if part.split() else ""
            if first in COMMANDS and len(part.split()) > 1:
                yield ["python", "-m", "ppdiffusers_tome", *part.split()]
            elif first == "make" or re.match(r"\s*python (-m ppdiffusers_tome|examples/|benchmarks/)", part):
                yield shlex.split(part, comments=True)


def bare_commands_in_cells(document: str) -> list[str]:
    """Commands in cells of tables that a shell does not know: `export --model …` without what runs it."""
    cells = [cell for rows in tables(document) for row in rows for cell in row]
    inline = [code for cell in cells for code in re.findall(r"`([^`]+)`", cell)]
    return [code for code in inline if re.match(rf"({'|'.join(COMMANDS)}) .*--[a-z-]+ \S", code)]


def snippets(document: str) -> list[str]:
    """The blocks of Python code."""
    return re.findall(r"^```python\n(.*?)^```$", text_of(document), re.DOTALL | re.MULTILINE)


def links(document: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", text_of(document))


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
