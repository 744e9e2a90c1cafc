"""Peak memory is exact to the byte."""

import paddle
import pytest
from lab.speed.memory import current_bytes, peak_bytes

MB = 1_000_000


def allocate(*megabytes):
    """Allocate all at once, then free them."""
    tensors = [paddle.empty([size * MB], dtype="int8") for size in megabytes]
    return len(tensors)


@pytest.mark.parametrize("before", [0, 40])
def test_peak_is_that_of_the_pass_alone(before):
    allocate(before + 1)  # an earlier peak, which Paddle 2.6 cannot forget
    kept = paddle.empty([3 * MB], dtype="int8")
    now = current_bytes()

    def run():
        allocate(5, 2)
        allocate(6)

    assert peak_bytes(run) - now == 7 * MB
    assert peak_bytes(lambda: allocate(1)) - now == 1 * MB
    assert current_bytes() == now and kept is not None
