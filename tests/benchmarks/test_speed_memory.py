"""Peak memory is exact to the byte."""

import gc

import paddle
import pytest
from lab.speed.memory import (
    available_bytes,
    current_bytes,
    peak_bytes,
    weights_bytes,
)
from paddle.base import core

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


def test_peaks_may_add_up_to_more_than_the_machine_has():
    gigabytes = available_bytes() // 10**9 // 2
    for _ in range(4):  # in Paddle 2.6 each raises the peak, up to which the next must fill
        now = current_bytes()
        assert peak_bytes(lambda: allocate(*[1000] * gigabytes)) - now == gigabytes * 10**9


def test_pass_without_room_beside_the_ballast_runs_again():
    """Paddle 3 needs no ballast, so the pass finds room at once."""
    allocate(40)
    gc.collect()  # what earlier tests left must not be freed during this one
    before, calls = current_bytes(), []

    def run():
        calls.append(current_bytes() - before)
        if calls[-1] > 30 * MB:
            raise MemoryError
        allocate(30)

    peak = peak_bytes(run)
    assert calls[-1] == 0 and len(calls) == (1 if peak else 2)
    assert peak in (None, before + 30 * MB) and current_bytes() == before
    with pytest.raises(MemoryError):
        peak_bytes(lambda: allocate(10**9))


def test_counters_of_a_gpu_are_read(monkeypatch):
    """Doubles: a pass that takes 7 bytes beside 5, after an earlier peak of 100, on the second GPU."""
    state = {"current": 5, "peak": 100}

    def reset(kind, index):
        assert (kind, index) == ("Allocated", 1)
        state["peak"] = state["current"]

    monkeypatch.setattr(paddle, "get_device", lambda: "gpu:1")
    for name, function in {
        "current_value": lambda kind, index: state["current"],
        "peak_value": lambda kind, index: state["peak"],
        "reset_peak_value": reset,
    }.items():
        monkeypatch.setattr(core, f"device_memory_stat_{name}", function, raising=False)
    assert peak_bytes(lambda: state.update(peak=12)) == 12 and current_bytes() == 5


def test_weights_are_counted_in_their_dtype():
    layer = paddle.nn.Linear(5, 7)
    assert weights_bytes(layer) == 4 * (5 * 7 + 7)
    assert weights_bytes(layer.to(dtype="bfloat16")) == 2 * (5 * 7 + 7)
