"""Checked against outputs of tomesd 0.1.3 (tests/golden/README.md)."""

import json
from pathlib import Path

import numpy as np
import paddle
import pytest
from conftest import groups

from ppdiffusers_tome import Grid, match_tokens, merge, unmerge

GOLDEN = Path(__file__).parents[1] / "golden"


def cases_of(name):
    with np.load(GOLDEN / name) as data:
        return [pytest.param(case, id=case["name"]) for case in json.loads(str(data["cases"]))]


def arrays_of(name, case):
    prefix = case["name"] + "/"
    with np.load(GOLDEN / name) as data:
        return {key.removeprefix(prefix): data[key] for key in data.files if key.startswith(prefix)}


def tokens_of(case, arrays):
    shape = case["B"], case["h"] * case["w"], case["C"]
    return (
        arrays["x"] if "x" in arrays else np.random.RandomState(case["seed"]).standard_normal(shape).astype("float32")
    )


def plan_for(x, case):
    return match_tokens(paddle.to_tensor(x), Grid(case["h"], case["w"]), case["kept"], case["sx"], case["sy"])


@pytest.mark.parametrize("case", cases_of("merge.npz"))
def test_merging_equals_tomesd(case):
    arrays = arrays_of("merge.npz", case)
    x = tokens_of(case, arrays)
    plan = plan_for(x, case)
    merged = merge(paddle.to_tensor(x), plan)
    assert merged.shape[1] == plan.kept == case["kept"]
    if not case["tie"]:  # with ties, tomesd's choice depends on an unstable sort
        if plan.merges:
            np.testing.assert_array_equal(groups(plan, case["B"]), arrays["group"])
        np.testing.assert_allclose(unmerge(merged, plan).numpy(), arrays["roundtrip"], atol=2e-6)


@pytest.mark.parametrize("case", cases_of("unet.npz"))
def test_unet_equals_diffusers_with_tomesd(pipe, case):
    arrays = arrays_of("unet.npz", case)
    rng = np.random.RandomState(case["seed"])
    sample = rng.standard_normal((case["B"], 4, case["h"], case["w"])).astype("float32")
    states = rng.standard_normal((case["B"], 24, 192)).astype("float32")
    arguments = [paddle.to_tensor(sample), paddle.to_tensor([case["timestep"]]), paddle.to_tensor(states)]
    with paddle.no_grad():
        plain = pipe.unet(*arguments).sample.numpy()
        with pipe.unet.tome(use_rand=False, method="tomesd", **case["tome"]):
            merged = pipe.unet(*arguments).sample.numpy()
    np.testing.assert_allclose(plain, arrays["plain"], atol=1e-4)
    np.testing.assert_allclose(merged, arrays["merged"], atol=1e-4)
    assert np.abs(merged - plain).max() == pytest.approx(case["effect"], abs=3e-4)
