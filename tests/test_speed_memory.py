"""Peak memory is exact to the byte, and a limit limits."""

import gc

import paddle
import pytest
from lab.speed.memory import (
    available_bytes,
    current_bytes,
    is_out_of_memory,
    limited,
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


@pytest.mark.parametrize(
    ("limit", "weights", "small", "large"),
    [(64 * MB, 0, 32, 320), (200 * MB, 150 * MB, 20, 120), (None, 0, 64, None)],  # None: what the machine has
)
def test_limit_raises_memory_error_and_ends_with_its_context(limit, weights, small, large):
    """The weights are part of it."""
    with limited(limit, weights):
        allocate(small)
        with pytest.raises(MemoryError) as error:
            allocate(large or 2 * available_bytes() // MB)
    assert is_out_of_memory(error.value)
    allocate(320)


def test_nothing_is_limited_on_a_gpu(monkeypatch):
    monkeypatch.setattr(paddle, "get_device", lambda: "gpu:0")
    with limited(64 * MB, 0):
        allocate(320)


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (MemoryError(), True),
        (RuntimeError("(ResourceExhausted) Fail to alloc memory of 4 size"), True),
        ("terminate called after throwing an instance of 'std::bad_alloc'", True),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory", True),
        (ValueError("shapes differ"), False),
        ("Segmentation fault", False),
    ],
)
def test_errors_of_memory_are_recognised(error, is_memory):
    assert is_out_of_memory(error) is is_memory
