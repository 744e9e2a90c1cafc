"""ppdiffusers' attention for GPUs, computed in its own plain arithmetic where there is no GPU; conftest.py imports this first.

ppdiffusers calls a CUDA kernel once, when it is imported. Where that works, it defines `F.scaled_dot_product_attention_`, which its
processors for xformers and Stable Diffusion 3 call, and `is_ppxformers_available()` is True. Without a GPU the call is
made to work here, and FLAGS_sdpa_select_math makes the function take its branch "math": no CUDA kernel ever runs.
"""

import os
from unittest.mock import patch

import paddle

KERNEL = "paddle.incubate.nn.memory_efficient_attention.memory_efficient_attention"

if paddle.device.cuda.device_count() == 0:
    os.environ["FLAGS_sdpa_select_math"] = "yes"
    with patch(KERNEL, return_value=None):
        from ppdiffusers.utils import import_utils

    # What ppdiffusers finds by itself on a CPU build. On a CUDA build it keeps finding what it would find with a GPU.
    import_utils._ppxformers_available = paddle.is_compiled_with_cuda()


def found(answer: bool = True):
    """A context in which ppdiffusers finds the attention for GPUs, or does not."""
    from ppdiffusers.utils import import_utils

    return patch.object(import_utils, "_ppxformers_available", answer)
