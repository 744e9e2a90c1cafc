"""ppdiffusers' attention for GPUs, in its own plain arithmetic where there is no GPU. conftest.py imports this first.

ppdiffusers calls a CUDA kernel once, when it is imported. Where that works, `is_ppxformers_available()` is True and
`F.scaled_dot_product_attention_` is defined, which the processors of xformers and Stable Diffusion 3 call. Without a
GPU this module makes the call work, and FLAGS_sdpa_select_math makes the function compute as `attention_op="math"`
does. No CUDA kernel runs.
"""

import os
from unittest.mock import patch

import paddle

KERNEL = "paddle.incubate.nn.memory_efficient_attention.memory_efficient_attention"

if paddle.device.cuda.device_count() == 0:
    os.environ["FLAGS_sdpa_select_math"] = "yes"  # noqa: SIM112 - its name
    with patch(KERNEL, return_value=None):
        from ppdiffusers.utils import import_utils

    # What ppdiffusers finds by itself on a CPU build. On a CUDA build it keeps finding what it would find with a GPU.
    import_utils._ppxformers_available = paddle.is_compiled_with_cuda()


def found(answer: bool = True):
    """A context in which ppdiffusers finds the attention for GPUs, or does not."""
    from ppdiffusers.utils import import_utils

    return patch.object(import_utils, "_ppxformers_available", answer)
