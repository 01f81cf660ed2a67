"""Ranks of a benchmark on emulated devices."""

import pytest
from measuring.link import bits_per_second
from measuring.ranks import Limits, run_ranks

from convoy.bench.emulated import Cluster, emulate
from convoy.errors import ConvoyError


def test_an_all_reduce_moves_what_the_link_lets_through() -> None:
    try:
        with emulate(Cluster.alike(2, 0.5, "200mbit")) as places:
            rates = run_ranks(bits_per_second, 2, 2**22, places=places, limits=Limits(60))
    except ConvoyError as error:
        pytest.skip(str(error))
    assert all(0.3 * 200e6 < rate < 1.1 * 200e6 for rate in rates), rates
