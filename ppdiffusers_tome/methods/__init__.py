"""The ways to merge tokens: each method chooses which tokens remain, and `plan` moves them.

A method is one file, with its settings and from its constants to its choice, and an entry of `METHODS`. Everything
else (wraps, summary, settings files, exports, commands) asks the class. The folder imports `errors`, `grid`,
`method_names`, `settings_file`, `tensors` and `wording`.
"""

from ..method_names import DEFAULT_METHOD
from .config import ToMeConfig
from .interlace import Interlace
from .todo import Todo
from .tomesd import Tomesd

METHODS: dict[str, type[ToMeConfig]] = {method.method: method for method in (Interlace, Todo, Tomesd)}
ToMeConfig.by_name = METHODS
__all__ = ["DEFAULT_METHOD", "METHODS", "Interlace", "ToMeConfig", "Todo", "Tomesd"]
