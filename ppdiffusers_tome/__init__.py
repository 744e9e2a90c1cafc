"""Token merging for ppdiffusers: `pipe.apply_tome(ratio=0.5)`.

Importing the package gives every ppdiffusers pipeline and model the methods `apply_tome`, `remove_tome`, `tome` and
`tome_summary`, which replace the `apply_tome` that ppdiffusers ships: it sets attributes of ppdiffusers' classes and
of `paddle.nn.Layer`.
"""

import sys

from ._version import __version__
from .compatibility import import_paddle_and_ppdiffusers
from .errors import (
    NoMergeableLayerError,
    ToMeConfigError,
    ToMeError,
    ToMeExportError,
    ToMePassError,
    UnsupportedVersionError,
)

# `python -m ppdiffusers_tome` imports this package before `__main__`, which reads the command line and only then
# imports the rest, so that --help need not wait for Paddle. While Python looks for the module, argv[0] is "-m".
if sys.argv[:1] != ["-m"] or sys.orig_argv[-len(sys.argv) - 1 :] != ["-m", __name__, *sys.argv[1:]]:
    import_paddle_and_ppdiffusers()

    from .api import ToMeMixin, apply_tome, install_methods, remove_tome, tome
    from .grid import Grid, choose_dst
    from .hub import prepare_download
    from .methods import ToMeConfig
    from .methods.matching import match_tokens
    from .methods.plan import MergePlan, merge, unmerge
    from .summary import BlockSummary, ToMeSummary, tome_summary

    install_methods()

__all__ = [
    "BlockSummary",
    "Grid",
    "MergePlan",
    "NoMergeableLayerError",
    "ToMeConfig",
    "ToMeConfigError",
    "ToMeError",
    "ToMeExportError",
    "ToMeMixin",
    "ToMePassError",
    "ToMeSummary",
    "UnsupportedVersionError",
    "__version__",
    "apply_tome",
    "choose_dst",
    "match_tokens",
    "merge",
    "prepare_download",
    "remove_tome",
    "tome",
    "tome_summary",
    "unmerge",
]
