"""Curves, links and the catalog."""

import json

import pytest

from convoy.errors import ConvoyError
from convoy.hardware.links import Hop, link_named, links
from convoy.planner.cost.link import Assumed, Curve, Link, Links, Rate, first_group
from convoy.plans.mesh import Mesh

CURVE = Curve(((1000, 2e-5), (100_000, 3e-5), (1_000_000, 4e-4)))


def test_a_curve_is_exact_at_its_points_and_straight_between():
    assert [CURVE(size) for size, _ in CURVE.points] == [seconds for _, seconds in CURVE.points]
    assert CURVE(550_000) == pytest.approx(2.15e-4)
    assert CURVE(10) == CURVE(1000) == 2e-5


def test_beyond_the_last_point_the_last_slope_goes_on():
    assert CURVE(1_900_000) == pytest.approx(4e-4 + 3.7e-4)
    falling = Curve(((1000, 3e-5), (2000, 2e-5)))
    assert falling(4000) == pytest.approx(2e-5 + 2000 * 1e-8)
    assert Curve(((100, 1e-6),))(1000) == pytest.approx(1e-5)


def test_a_curve_through_points_takes_the_median_of_a_size():
    found = Curve.through([(10, 3.0), (5, 1.0), (10, 1.0), (10, 2.0)])
    assert found.points == ((5, 1.0), (10, 2.0))


@pytest.mark.parametrize("points", [(), ((2, 1.0), (1, 2.0)), ((1, 1.0), (1, 2.0)), ((1, -1.0),)])
def test_what_is_no_curve_is_refused(points):
    with pytest.raises(ConvoyError, match="a curve needs"):
        Curve(points)


def test_links_are_found_by_the_ranks_that_they_join():
    near, far = Link(CURVE, CURVE), Link(Curve(((0, 1.0),)), CURVE, overlap=True, cpu_share=0.5)
    links = Links({(0, 1): near, (0, 2): far})
    mesh = Mesh(("a", "b"), (2, 2))
    assert links.of(mesh, (1,)) is near
    assert links.of(mesh, (0,)) is far
    assert links.of(Mesh(("only",), (2,)), (0,)) is near
    assert links.of(mesh, (0, 1)) is far  # the slowest that is known
    assert Links.from_list(json.loads(json.dumps(links.to_list()))) == links


def test_nothing_known_of_links_is_said():
    with pytest.raises(ConvoyError, match=r"between ranks \[0, 1\]"):
        Links().of(Mesh(("a",), (2,)), (0,))


def test_the_first_group_of_some_axes():
    mesh = Mesh(("a", "b", "c"), (2, 3, 2))
    assert first_group(mesh, (2,)) == (0, 1)
    assert first_group(mesh, (2, 0)) == (0, 1, 6, 7)
    assert first_group(mesh, (1,)) == (0, 2, 4)


def test_a_ring_adds_in_twice_as_many_hops_as_there_are_others():
    link = Rate(1e-5, 1e9).link(4, overlap=True, cpu_share=0.0)
    assert link.all_reduce(4 << 20) == pytest.approx(6 * (1e-5 + (1 << 20) / 1e9))
    assert link.exchange(1 << 20) == pytest.approx(3 * 1e-5 + (1 << 20) / 1e9)


def test_the_slowest_part_of_the_way_decides():
    cluster = Assumed(Rate.of(Hop.gbit(1)), inside=Rate.of(links()["pcie3"]), per_host=4)
    mesh = Mesh(("host", "gpu"), (2, 4))
    inside, between = (cluster.links().of(mesh, (axis,)) for axis in (1, 0))
    assert inside.all_reduce(1 << 26) * 10 < between.all_reduce(1 << 26)
    assert Hop.gbit(8).rate == pytest.approx(0.9e9)


def test_the_catalog_gives_what_was_published():
    """Baidu's all-reduce of 67 MB on 8 Titan X behind two PCIe roots took 22.2 ms, on 8 GTX 1080 Ti behind one 13.4."""
    assert Rate.of(links()["pcie3"]).link(8, True, 0).all_reduce(67_108_864) == pytest.approx(22.2e-3, rel=0.15)
    assert Rate.of(links()["pcie3-switch"]).link(8, True, 0).all_reduce(67_108_864) < 15e-3
    assert all(hop.source and hop.rate > 1e8 for hop in links().values())
    with pytest.raises(ConvoyError, match="pcie3"):
        link_named("string")
