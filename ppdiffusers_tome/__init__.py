"""Token merging for ppdiffusers: `pipe.apply_tome(ratio=0.5)`.

Importing the package gives every ppdiffusers pipeline and model the methods `apply_tome`, `remove_tome`, `tome` and
`tome_summary`, which replace the `apply_tome` that ppdiffusers ships. It has no other side effect.
"""

import warnings
import zlib  # noqa: F401 - before Paddle 2.6, whose own zlib otherwise crashes Pillow; see warn_if_zlib_is_replaced

from ._version import __version__
from .compatibility import check_version, import_pip, warn_if_zlib_is_replaced
from .errors import (
    NoMergeableLayerError,
    ToMeConfigError,
    ToMeError,
    ToMeExportError,
    ToMePassError,
    UnsupportedVersionError,
)

try:
    with warnings.catch_warnings():  # for those who compile operators of their own
        warnings.filterwarnings("ignore", "No ccache found", UserWarning)
        import paddle
except ModuleNotFoundError as error:
    if error.name != "paddle":  # Paddle is there, and lacks something itself
        raise
    raise ModuleNotFoundError(
        "ppdiffusers_tome needs PaddlePaddle: install paddlepaddle==3.3.1 for a CPU, or paddlepaddle-gpu for a GPU "
        "(2.6.2 up to RTX 30 and A100; for newer ones 3.3.1 from Paddle's own index), not both.",
        name="paddle",
    ) from error
check_version("PaddlePaddle", paddle.__version__)
warn_if_zlib_is_replaced()
import_pip()

import ppdiffusers  # noqa: E402

check_version("ppdiffusers", ppdiffusers.__version__)

from .api import ToMeMixin, apply_tome, install_methods, remove_tome, tome  # noqa: E402
from .config import ToMeConfig  # noqa: E402
from .grid import Grid, choose_dst  # noqa: E402
from .hub import prepare_download  # noqa: E402
from .methods.plan import MergePlan, merge, unmerge  # noqa: E402
from .methods.tomesd import match_tokens  # noqa: E402
from .summary import BlockSummary, ToMeSummary, tome_summary  # noqa: E402

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
