"""Random tensors to hand to a pipeline in place of what an encoder would compute."""

import numpy as np
import paddle


def noise(*shape, seed=0):
    """A float32 tensor of normal noise."""
    return paddle.to_tensor(np.random.RandomState(seed).standard_normal(shape).astype("float32"))


def embeddings(*shape):
    """The keyword arguments that stand for a prompt and a negative prompt."""
    return {"prompt_embeds": noise(*shape, seed=1), "negative_prompt_embeds": noise(*shape, seed=2)}
