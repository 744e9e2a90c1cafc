"""Random tensors that replace the outputs of a pipeline's encoders."""

import numpy as np
import paddle


def noise(*shape, seed=0):
    """A float32 tensor of normal noise."""
    return paddle.to_tensor(np.random.RandomState(seed).standard_normal(shape).astype("float32"))


def embeddings(*shape):
    """Keyword arguments that replace a prompt and a negative prompt."""
    return {"prompt_embeds": noise(*shape, seed=1), "negative_prompt_embeds": noise(*shape, seed=2)}
