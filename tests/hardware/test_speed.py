"""Times on devices that are not at hand: counts of work by hand, and that more of anything takes longer."""

import pytest
import torch
from torch import nn

from convoy.hardware.catalog import device_named, machine
from convoy.hardware.exchange import Scheme, Site, inside_link, ring, site_of, step
from convoy.hardware.speed import Software, arithmetic, times
from convoy.hardware.work import KINDS, Work, work_of

NET = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 64, 10)
)
P100, V100 = device_named("p100-pcie"), device_named("v100-sxm2")
SITE = Site(8, "pcie3", "10gbit")
OURS = Software()


@pytest.fixture(scope="module")
def work() -> Work:
    return work_of(NET, (3, 16, 16))


def test_work_of_one_image(work: Work) -> None:
    kinds = [KINDS[kind] for kind in work.kind]
    assert kinds == ["conv", "norm", "pointwise", "pool", "linear"]
    assert list(work.macs) == [16 * 16 * 8 * 3 * 9, 0, 0, 0, 512 * 10]
    assert work.read[0] == 3 * 16 * 16 and work.written[0] == 8 * 16 * 16
    assert work.window[0] == 9 and work.depth[0] == 3 and work.width[0] == 8 and work.first[0] == 1
    assert work.parameters == sum(p.numel() for p in NET.parameters()) and work.tensors == 6


def test_without_a_fit_a_large_convolution_takes_its_arithmetic(work: Work) -> None:
    large = work_of(nn.Conv2d(1024, 1024, 3, padding=1), (1024, 64, 64))
    found = times(large, 8, V100, "fp32", OURS, {})
    least = 2 * 8 * 64 * 64 * 1024 * 1024 * 9 / 15.7e12
    assert least < found.forward[0] < 1.2 * least


def test_more_images_and_less_device_take_longer(work: Work) -> None:
    seconds = times(work, 64, V100, "fp32", OURS).total
    assert times(work, 64000, V100, "fp32", OURS).total > 2 * seconds
    assert times(work, 6400, device_named("k80"), "fp32", OURS).total > times(work, 6400, V100, "fp32", OURS).total


def test_precisions_that_a_device_lacks_are_computed_with_what_it_has() -> None:
    assert arithmetic(device_named("gtx-1080"), "fp16").units == "fp32"
    assert arithmetic(P100, "fp16").units == "half"
    assert arithmetic(V100, "fp16").units == "tensor"
    assert arithmetic(device_named("a100-sxm4"), "tf32").peak == 156e12


def test_a_ring_sends_what_the_formula_says() -> None:
    inside, between = ring(1e9, 16, Site(8, "pcie3", "10gbit"), lambda name: 1.0)
    assert inside == pytest.approx(2 * 7 / 8 * 1e9 / 5.89e9, rel=0.01)
    assert between == pytest.approx(1e9 / (0.9 * 1.25e9), rel=0.01)


@pytest.mark.parametrize("kind", ["ring", "tree", "host", "server-gpu", "servers", "keras", "replicated"])
def test_several_devices_take_longer_than_one_and_slower_links_longer_still(work: Work, kind: str) -> None:
    def seconds(count: int, link: str) -> float:
        site = Site(4, link, "10gbit")
        return step(work, 32, P100, "fp32", OURS, count, site, Scheme(kind, overlap=False)).seconds

    assert seconds(1, "pcie3") < seconds(4, "pcie3") < seconds(4, "pcie3-x1")
    assert seconds(4, "pcie3") < seconds(8, "pcie3")


def test_overlap_hides_and_a_slow_input_shows(work: Work) -> None:
    def of(scheme: Scheme) -> float:
        return step(work, 32, P100, "fp32", OURS, 8, SITE, scheme).seconds

    assert of(Scheme()) < of(Scheme(overlap=False))
    large = work_of(nn.Conv2d(3, 8, 3), (3, 224, 224))
    fed = [step(large, 512, V100, "fp32", OURS, 8, SITE, Scheme(feed=feed)) for feed in ("synthetic", "real")]
    assert fed[1].seconds > 2 * fed[0].seconds and fed[1].holds_back == "input"


def test_what_passes_through_the_memory_of_the_host_is_slow_and_shared_by_pairs() -> None:
    def rate(link: str, local: int) -> float:
        return inside_link(Site(8, link, memory=1000), local, lambda name: 1.0).rate

    assert rate("pcie4-host", 2) == 6e9 < rate("pcie4", 2) and rate("pcie4-shared", 8) == 3e9
    assert rate("pcie3-bridge", 2) > rate("pcie3", 2) and rate("pcie3-bridge", 4) == rate("pcie3-host", 4)
    found = [site_of(machine(text)).link for text in ("4xrtx-3090", "8xrtx-3090", "8xa100-pcie")]
    assert found == ["pcie4-host", "pcie4-shared", "pcie4"]


def test_single_tensors_cost_more_than_one_message_and_more_cores_feed_more(work: Work) -> None:
    def seconds(site: Site, scheme: Scheme) -> float:
        return step(work, 4096, P100, "fp32", OURS, 16, site, scheme).seconds

    assert seconds(SITE, Scheme()) < seconds(SITE, Scheme(fused=False))
    assert seconds(SITE, Scheme()) + 4e-3 < seconds(SITE, Scheme(cycle=5e-3))
    few, many = (seconds(Site(8, "pcie3", "10gbit", cores=cores), Scheme(feed="real")) for cores in (4, 64))
    assert few > 2 * many


def test_a_pipeline_has_the_bubble_of_gpipe(work: Work) -> None:
    def seconds(parts: int) -> float:
        return step(work, 64, P100, "fp32", OURS, 4, SITE, Scheme("pipeline", parts=parts)).seconds

    assert seconds(1) / seconds(4) == pytest.approx(16 / 7, rel=1e-6)


def test_groups_and_transposes_are_counted() -> None:
    work = work_of(nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.ConvTranspose2d(8, 4, 2, 2)), (8, 10, 10))
    assert list(work.groups) == [8, 1] and list(work.macs) == [8 * 8 * 8 * 9, 8 * 8 * 8 * 4 * 4]
    assert torch.tensor(list(work.macs)).isfinite().all()
