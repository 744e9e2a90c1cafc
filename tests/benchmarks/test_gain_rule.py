"""The simulated errors of the rule by which gains are claimed, which documents quote."""

import json
import re
from itertools import combinations
from pathlib import Path

import gain_rule
import numpy as np
import pytest

import ppdiffusers_tome
from ppdiffusers_tome.comparison.clock import MARGIN, order_of_round
from ppdiffusers_tome.comparison.option_defaults import ROUNDS

MEASURES = Path(ppdiffusers_tome.__file__).parent / "serving" / "page" / "measures.js"


def claims(factor, **wanted):
    """The claims of the committed rows that have these values."""
    rows = json.loads(gain_rule.RESULT.read_text(encoding="utf-8"))["rows"]
    found = [row["claims"][f"{factor}"] for row in rows if all(row[name] == value for name, value in wanted.items())]
    assert found
    return found


@pytest.mark.parametrize("count", [3, 6, ROUNDS])
def test_the_committed_result_is_of_the_rule(count):
    computed = gain_rule.claims_in_turns(gain_rule.normal, np.random.default_rng([count, 60]), 0.06, count)
    for factor in gain_rule.GAINS:
        (committed,) = claims(factor, rule="compare", noise="normal", spread=0.06, count=count)
        assert computed[f"{factor}"] == pytest.approx(committed, abs=0.001)


def test_false_claims_are_rare_in_any_noise_and_a_gain_of_a_tenth_is_found():
    assert max(claims(1.0, rule="compare")) < 0.05
    assert set(claims(1.3, rule="compare", count=1) + claims(1.3, rule="compare", count=2)) == {0}
    for spread, least in ((0.01, 0.94), (0.03, 0.79)):
        assert min(claims(1.1, rule="compare", count=ROUNDS, spread=spread)) > least


@pytest.mark.parametrize("arms", [2, 3, 7])
def test_each_arm_comes_before_each_other_in_every_second_round(arms):
    """On a machine that becomes slower, an arm that came first more often would seem faster."""
    orders = [order_of_round(range(arms), index) for index in range(1, ROUNDS + 1)]
    for first, second in combinations(range(arms), 2):
        assert sum(order.index(first) < order.index(second) for order in orders) in (ROUNDS // 2, ROUNDS // 2 + 1)
    assert len(set(map(tuple, orders))) > 1


def test_the_page_of_serve_has_the_margin_and_enough_times():
    script = MEASURES.read_text(encoding="utf-8")
    near, least = (re.search(rf"const {name} = ([0-9.]+);", script)[1] for name in ("NEAR", "MIN_TIMES"))
    assert float(near) == MARGIN
    for noise in ("normal", "heavy"):
        assert max(claims(1.0, rule="page", noise=noise, count=int(least))) < 0.06
        assert max(claims(1.0, rule="page", noise=noise, count=3)) > 0.25, "as few as it took before"
