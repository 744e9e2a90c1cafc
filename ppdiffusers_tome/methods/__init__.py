"""The ways to merge tokens: each method chooses which tokens remain, and `plan` moves them.

A method is one file, from its constants to its choice, and an entry of `METHODS`. Everything else (settings, wraps,
summary, exports, commands) asks the entry. The folder imports `errors`, `grid`, `method_names` and `tensors`.
"""

from ..method_names import DEFAULT_METHOD
from .interlace import INTERLACE
from .method import Method
from .todo import TODO
from .tomesd import TOMESD

METHODS: dict[str, Method] = {method.name: method for method in (INTERLACE, TODO, TOMESD)}
__all__ = ["DEFAULT_METHOD", "METHODS", "Method"]
