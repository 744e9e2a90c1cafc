"""Make ppdiffusers' attention for GPUs run in plain arithmetic on CPUs. conftest.py imports this first.

ppdiffusers calls a CUDA kernel once on import. If that works, `is_ppxformers_available()` is True and
`F.scaled_dot_product_attention_` is defined, which the processors of xformers and Stable Diffusion 3 call. Without a
GPU this module makes the call succeed, and FLAGS_sdpa_select_math makes the function compute like
`attention_op="math"`. No CUDA kernel runs.
"""

import os
from unittest.mock import patch

import paddle
import ppdiffusers_source  # noqa: F401 - before ppdiffusers, which it chooses

KERNEL = "paddle.incubate.nn.memory_efficient_attention.memory_efficient_attention"

if paddle.device.cuda.device_count() == 0:
    os.environ["FLAGS_sdpa_select_math"] = "yes"  # noqa: SIM112 - its name
    with patch(KERNEL, return_value=None):
        from ppdiffusers.utils import import_utils

    # On a CPU build what ppdiffusers reports by itself; on a CUDA build what it would report with a GPU.
    import_utils._ppxformers_available = paddle.is_compiled_with_cuda()


def available(answer: bool = True):
    """A context in which ppdiffusers reports its attention for GPUs as available, or not."""
    from ppdiffusers.utils import import_utils

    return patch.object(import_utils, "_ppxformers_available", answer)
