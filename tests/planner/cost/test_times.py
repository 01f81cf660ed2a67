"""Times of operations and links: which are the same, what is counted of them, and what is told from measured ones."""

import pytest

from convoy.hardware.catalog import Hop
from convoy.hardware.catalog import links as catalog
from convoy.planner.cost.calibrated import Calibrated, fitted
from convoy.planner.cost.costs import Roofline, Times
from convoy.planner.cost.link import ring
from convoy.planner.cost.local_op import LocalOp, Operand

ROOFLINE = Roofline(1e9, 1e9, 1e-6)


def conv(samples: int, channels: int = 16, stride: int = 1, size: int = 14) -> LocalOp:
    x = Operand((samples, channels, size, size), "float32", gradient=True)
    weight = Operand((channels, channels, 3, 3), "float32", "parameter", True)
    y = Operand((samples, channels, size // stride, size // stride), "float32", gradient=True)
    return LocalOp("conv", "", (x, weight), (y,), (("groups", 1), ("stride", (stride, stride)), ("transposed", False)))


def relu(numel: int, function: str = "relu") -> LocalOp:
    one = Operand((numel,), "float32", gradient=True)
    return LocalOp("elementwise", function, (one,), (one,))


def test_times_between_measured_ones_have_an_efficiency_between_theirs() -> None:
    def ratio(times: Calibrated, op: LocalOp) -> float:
        return times(op).forward / ROOFLINE(op).forward

    one = conv(4)  # the slower of arithmetic and memory
    assert ROOFLINE(one).forward == pytest.approx(1e-6 + one.flops.forward / 1e9)
    assert Roofline(1e12, 1e6)(one).forward == pytest.approx(one.bytes.forward / 1e6)
    truth = Roofline(3e10, 5e9)
    operations = (conv(8), conv(16), conv(8, channels=32), relu(10**5), relu(10**6))
    result = fitted({one: truth(one) for one in operations})
    assert (result.flops_per_s, result.bytes_per_s) == pytest.approx((3e10, 5e9), rel=0.01)
    sizes = Calibrated({conv(n): ROOFLINE(conv(n)) * factor for n, factor in ((4, 2.0), (64, 4.0))}, ROOFLINE)
    assert sizes(conv(4)) == ROOFLINE(conv(4)) * 2  # what was measured is exact
    assert 2.0 < ratio(sizes, conv(5)) < 2.2 < ratio(sizes, conv(16)) < 3.8 < ratio(sizes, conv(60)) < 4.0
    strides = {conv(4, stride=s): ROOFLINE(conv(4, stride=s)) * factor for s, factor in ((1, 2), (2, 5))}
    for s, factor in ((1, 2), (2, 5)):  # layers of the same options are nearer
        assert ratio(Calibrated(strides, ROOFLINE), conv(5, stride=s)) == pytest.approx(factor, rel=0.05)
    hosts = {relu(64 << k): Times(1e-6, 2e-6, 1e-5 * (k + 1), 2e-5 * (k + 1)) for k in range(3)}
    assert Calibrated(hosts)(relu(10**6)).host == pytest.approx(6e-5)  # as long as others of its sort take


def test_rates_by_name_are_as_published_and_the_slowest_part_of_the_way_decides() -> None:
    four = ring(Hop(1e-5, 1e9), 4, overlap=True, cpu_share=0.0)  # twice as many hops as there are others
    assert four.all_reduce(4 << 20) == pytest.approx(6 * (1e-5 + (1 << 20) / 1e9))
    assert four.exchange(1 << 20) == pytest.approx(3 * 1e-5 + (1 << 20) / 1e9)
    # Baidu's all-reduce of 67 MB on 8 Titan X behind two PCIe roots took 22.2 ms, on 8 GTX 1080 Ti behind one 13.4.
    pcie, switch = (ring(catalog()[name], 8, True, 0) for name in ("pcie3", "pcie3-switch"))
    assert pcie.all_reduce(67_108_864) == pytest.approx(22.2e-3, rel=0.15)
    assert switch.all_reduce(67_108_864) < 15e-3
