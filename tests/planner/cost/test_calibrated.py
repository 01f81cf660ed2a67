"""Rooflines, and times from measured neighbours."""

from dataclasses import replace

import pytest

from convoy.planner.cost.calibrated import Calibrated, fitted
from convoy.planner.cost.gradients import Update
from convoy.planner.cost.local_op import LocalOp, Operand
from convoy.planner.cost.times import Roofline, Times

ROOFLINE = Roofline(1e9, 1e9, 1e-6)


def conv(samples, channels=16, kernel=3, stride=1, size=14):
    x = Operand((samples, channels, size, size), "float32", gradient=True)
    weight = Operand((channels, channels, kernel, kernel), "float32", "parameter", True)
    y = Operand((samples, channels, size // stride, size // stride), "float32", gradient=True)
    return LocalOp("conv", "", (x, weight), (y,), (("groups", 1), ("stride", (stride, stride)), ("transposed", False)))


def relu(numel, function="relu"):
    one = Operand((numel,), "float32", gradient=True)
    return LocalOp("elementwise", function, (one,), (one,))


def test_the_slower_of_arithmetic_and_memory_counts():
    one = conv(4)
    assert ROOFLINE(one).forward == pytest.approx(1e-6 + one.flops.forward / 1e9)
    slow_memory = Roofline(1e12, 1e6)
    assert slow_memory(one).forward == pytest.approx(one.bytes.forward / 1e6)
    assert ROOFLINE(relu(1000)) == Times(1e-6 + 8e-6, 1e-6 + 12e-6)


def test_views_take_no_time_and_neither_does_nothing():
    view = LocalOp("reshape", "", (Operand((4, 4), "float32"),), (Operand((16,), "float32"),))
    assert ROOFLINE(view) == Times()
    assert ROOFLINE(relu(0)) == Times()


def test_what_was_measured_is_exact():
    calibrated = Calibrated({conv(4): Times(1.0, 3.0), conv(8): Times(1.7, 5.0)}, ROOFLINE)
    assert calibrated(conv(4)) == Times(1.0, 3.0)
    assert calibrated(conv(8)) == Times(1.7, 5.0)


def test_between_two_sizes_the_efficiency_lies_between_theirs():
    times = {
        conv(n): Times(factor * ROOFLINE(conv(n)).forward, ROOFLINE(conv(n)).backward)
        for n, factor in ((4, 2.0), (64, 4.0))
    }
    calibrated = Calibrated(times, ROOFLINE)
    assert 2.0 < calibrated(conv(16)).forward / ROOFLINE(conv(16)).forward < 4.0
    near_small = calibrated(conv(5)).forward / ROOFLINE(conv(5)).forward
    near_large = calibrated(conv(60)).forward / ROOFLINE(conv(60)).forward
    assert 2.0 < near_small < 2.2
    assert 3.8 < near_large < 4.0
    assert calibrated(conv(16)).backward == pytest.approx(ROOFLINE(conv(16)).backward, rel=0.01)


def test_a_device_of_half_the_speed_is_found_from_one_layer():
    calibrated = Calibrated({conv(4): ROOFLINE(conv(4)) * 2}, ROOFLINE)
    for other in (conv(32), conv(4, channels=64), conv(8, stride=2)):
        assert calibrated(other).total == pytest.approx(2 * ROOFLINE(other).total, rel=0.06)
    assert calibrated(relu(1000)).total == pytest.approx(2 * ROOFLINE(relu(1000)).total, rel=0.02)  # for want of one


def slow_weights(local_op):
    """A device on which weights take five times as long as activations: small batches gain little."""
    weights = sum(operand.bytes for operand in local_op.inputs if operand.role == "parameter")
    seconds = [
        1e-6 + flops / 1e11 + (moved - (1 + way) * weights) / 1e10 + (1 + way) * weights / 2e9
        for way, (flops, moved) in enumerate(zip(local_op.flops, local_op.bytes, strict=True))
    ]
    return Times(*seconds)


def test_what_does_not_shrink_with_the_batch_is_told_apart():
    measured = [conv(n, channels, size=7) for n in (16, 64) for channels in (64, 128, 256, 512)]
    calibrated = Calibrated({one: slow_weights(one) for one in measured})
    for samples in (4, 8, 32, 128):
        one = conv(samples, 256, size=7)
        assert calibrated(one).total == pytest.approx(slow_weights(one).total, rel=0.15), samples
    small, large = slow_weights(conv(4, 256, size=7)).total, slow_weights(conv(16, 256, size=7)).total
    assert small > 1.2 * large / 4  # in proportion to the samples it would be far off


def test_layers_of_the_same_options_are_nearer():
    measured = {conv(4, stride=1): ROOFLINE(conv(4)) * 2, conv(4, stride=2): ROOFLINE(conv(4, stride=2)) * 5}
    calibrated = Calibrated(measured, ROOFLINE)
    assert calibrated(conv(5, stride=2)).forward / ROOFLINE(conv(5, stride=2)).forward == pytest.approx(5, rel=0.05)
    assert calibrated(conv(5)).forward / ROOFLINE(conv(5)).forward == pytest.approx(2, rel=0.05)


def test_functions_are_calibrated_apart():
    measured = {relu(1000): ROOFLINE(relu(1000)), relu(1000, "gelu"): ROOFLINE(relu(1000)) * 10}
    calibrated = Calibrated(measured, ROOFLINE)
    assert calibrated(relu(2000, "gelu")).forward == pytest.approx(10 * calibrated(relu(2000)).forward)
    unknown = calibrated(relu(2000, "mish")).forward / ROOFLINE(relu(2000)).forward
    assert unknown == pytest.approx(5.5)  # between the two


def test_a_roofline_from_what_was_measured():
    truth = Roofline(3e10, 5e9)
    measured = {one: truth(one) for one in (conv(8), conv(16), conv(8, channels=32), relu(10**5), relu(10**6))}
    found = fitted(measured)
    assert found.flops_per_s == pytest.approx(3e10, rel=0.01)
    assert found.bytes_per_s == pytest.approx(5e9, rel=0.01)
    assert fitted({}).flops_per_s > 0
    assert Calibrated(measured)(conv(32)).forward == pytest.approx(truth(conv(32)).forward, rel=0.15)


def test_empty_pieces_do_not_disturb():
    empty = replace(conv(4), inputs=(Operand((0, 16, 14, 14), "float32"), conv(4).inputs[1]))
    empty = replace(empty, outputs=(Operand((0, 16, 14, 14), "float32"),))
    calibrated = Calibrated({empty: Times(1e-5, 1e-5), conv(4): ROOFLINE(conv(4))}, ROOFLINE)
    assert calibrated(conv(8)).total == pytest.approx(ROOFLINE(conv(8)).total, rel=0.01)
    assert calibrated(empty) == Times(1e-5, 1e-5)


def test_an_optimizer_from_measured_points():
    truth = Update(2e-10, 3e-6)
    points = [(size, count, truth.seconds(size, count)) for size, count in ((10**8, 16), (10**8, 160), (10**6, 60))]
    found = Update.fit(points, state=2.0, divisible=True)
    assert (found.per_byte, found.per_tensor) == (pytest.approx(2e-10), pytest.approx(3e-6))
    assert (found.state, found.divisible) == (2.0, True)
    assert Update.fit(points[:1]).per_byte == pytest.approx(points[0][2] / 10**8)
    assert Update.fit([]) == Update()
    odd = Update.fit([(10**8, 16, 1.0), (10**8, 1600, 0.9)])  # more tensors do not make it faster
    assert odd.per_tensor == 0
    assert odd.per_byte > 0
