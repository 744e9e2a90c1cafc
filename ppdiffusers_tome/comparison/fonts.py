"""A font for texts in any language: Pillow's own if it has all characters, or an installed font."""

import subprocess
from collections.abc import Iterator
from typing import TypeAlias

from PIL import ImageFont

Font: TypeAlias = ImageFont.FreeTypeFont | ImageFont.ImageFont
SIZE = 13  # px
MISSING = "\U0010ffff"  # never a character: fonts draw it as they draw what they lack
# Fonts with Chinese, Japanese and Korean, which Pillow finds by name in the system's folders: of Linux, then of macOS.
NAMES = (
    "NotoSansCJK-Regular.ttc",
    "NotoSansSC-Regular.otf",
    "wqy-zenhei.ttc",
    "wqy-microhei.ttc",
    "DroidSansFallbackFull.ttf",
    "PingFang.ttc",
    "Hiragino Sans GB.ttc",
    "Arial Unicode.ttf",
)


def font_for(text: str) -> Font:
    """The font that has most characters of a text: Pillow's, unless an installed font has more."""
    own = ImageFont.load_default(SIZE)
    best, lacks = own, missing(own, text)
    for file in _installed(lacks) if lacks else ():
        try:
            font = ImageFont.truetype(file, SIZE)
        except OSError:  # not installed, or a font of bitmaps in different sizes
            continue
        if len(found := missing(font, text)) < len(lacks):
            best, lacks = font, found
        if not lacks:
            break
    return best


def missing(font: Font, text: str) -> str:
    """The characters of a text that a font lacks, each once."""
    return "".join(char for char in dict.fromkeys(text) if not char.isspace() and not _has(font, char))


def printable(font: Font, text: str) -> str:
    """The text, with escapes such as \\u7ea2 for the characters that a font lacks."""
    lacks = missing(font, text)
    return "".join(char.encode("ascii", "backslashreplace").decode() if char in lacks else char for char in text)


def _has(font: Font, char: str) -> bool:
    return bytes(font.getmask(char)) != bytes(font.getmask(MISSING))


def _installed(chars: str) -> Iterator[str]:
    """Files of fonts that may have these characters: those that fontconfig names, where it is, and those of NAMES."""
    command = ["fc-list", "--format=%{file}\\n", ":charset=" + " ".join(f"{ord(char):x}" for char in chars)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        yield from sorted(done.stdout.splitlines())
    except (OSError, subprocess.SubprocessError):  # without fontconfig
        pass
    yield from NAMES
