"""The ways to merge tokens: each method chooses tokens and moves them. Imports the grid, tensors and errors only.

A method is one file, from its constants to its plan, and an entry of `METHODS`. Everything else (settings, wraps,
summary, exports, commands) asks the entry.
"""

from .cells import TODO
from .method import Method
from .pairs import DEFAULT, KV, SYMMETRIC, TOMESD

METHODS: dict[str, Method] = {method.name: method for method in (DEFAULT, SYMMETRIC, TOMESD, KV, TODO)}
