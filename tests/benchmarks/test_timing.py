"""Quartiles of benchmarks, which may have infinite values."""

import math

import numpy as np
from lab.timing import quartiles


def test_quartiles_are_those_of_numpy_but_for_infinite_values():
    for values in ([3.0], [1.0, 4.0], [9.0, 1.0, 2.0], [0.1, 0.2, 0.4, 0.8, 1.6, 3.2]):
        np.testing.assert_allclose(quartiles(values), np.quantile(values, [0.5, 0.25, 0.75]), rtol=1e-15)
    inf = math.inf
    assert quartiles([inf, inf]) == (inf, inf, inf) and quartiles([5, inf, inf]) == (inf, inf, inf)
    assert quartiles([5, 6, 7, inf]) == (6.5, 5.75, inf)
