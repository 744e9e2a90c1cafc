"""The ways to merge tokens: each method chooses which tokens merge, and its plan moves them.

A method is one file, from its constants to its plan, and an entry of `METHODS`. Everything else (settings, wraps,
summary, exports, commands) asks the entry. The folder imports `errors`, `grid` and `tensors`.
"""

from .cells import TODO
from .interlace import INTERLACE
from .method import Method
from .pairs import DEFAULT, KV, SYMMETRIC, TOMESD

METHODS: dict[str, Method] = {method.name: method for method in (INTERLACE, TODO, TOMESD, DEFAULT, SYMMETRIC, KV)}
DEFAULT_METHOD = INTERLACE.name
