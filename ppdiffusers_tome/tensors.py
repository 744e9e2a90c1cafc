"""Tensor operations that Paddle's own would copy, round or compute where it must not."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import paddle

HALF = (paddle.float16, paddle.bfloat16)
LARGEST = 3.4028234663852886e38  # in float32


@paddle.jit.not_to_static  # Paddle would compute them in the program
def constants(arrays: Any) -> Any:
    """A NumPy array, or those of a NamedTuple, as int64 tensors that are constants of a program."""
    if isinstance(arrays, tuple):
        return type(arrays)(*map(constants, arrays))
    return paddle.to_tensor(arrays, dtype="int64")


def cast(x: paddle.Tensor, dtype: paddle.dtype) -> paddle.Tensor:
    """`x.cast(dtype)` without the copy that Paddle makes even if the dtype is the same."""
    return x if x.dtype == dtype else x.cast(dtype)


def gather(x: paddle.Tensor, index: paddle.Tensor, axis: int = 0) -> paddle.Tensor:
    """`paddle.gather`; float16 goes through float32 on the CPU, where Paddle has no float16 gather."""
    if x.dtype == paddle.float16 and paddle.get_device() == "cpu":
        return paddle.gather(x.cast("float32"), index, axis=axis).cast("float16")
    return paddle.gather(x, index, axis=axis)


def first_number(x: paddle.Tensor) -> paddle.Tensor:  # [B] or a single number, of any dtype → [1] float32
    """The first number of a tensor; in a program the length of a slice may be unknown."""
    return cast(x.reshape([-1])[:1].reshape([1]), paddle.float32)


def count_rows(rows: paddle.Tensor) -> paddle.Tensor:
    """0, 1, … n - 1 for rows [n, …], in int64; a program may not know n."""
    return paddle.cumsum(paddle.ones_like(rows, dtype="int64"), axis=0) - 1


def full_precision() -> AbstractContextManager:
    """Turn mixed precision off so that a matmul stays in its dtype; Paddle cannot do so in a static program."""
    return paddle.amp.auto_cast(enable=False) if paddle.in_dynamic_mode() else nullcontext()


def finite_or_zero(x: paddle.Tensor) -> paddle.Tensor:
    """`x` in float32, with 0 in place of NaN and infinity; ONNX converters do not know `isfinite`."""
    return paddle.where(paddle.abs(x) <= LARGEST, x, paddle.zeros_like(x))
