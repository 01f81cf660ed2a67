"""What follows from facts: one broken training for each rule, and a healthy one."""

from dataclasses import replace
from typing import Any

import pytest

from convoy.doctor.advice import Diagnosis, advise
from convoy.doctor.facts import Facts, InputModel, Pictures, RankFacts, Trial
from convoy.doctor.gpu import GpuLoad, GpuProcess
from convoy.doctor.host import HostLoad, OtherProcess

HEALTHY = Facts(
    model="resnet18",
    data="photos",
    devices=1,
    plan="serial",
    batch=64,
    update_s=1.0,
    ranks=(RankFacts(64, wait_s=0.001, own_s=0.99),),
    parts={"forward": 0.3, "backward": 0.6, "optimizer": 0.05},
    compute_s=0.99,
    workers=1,
    cores=2.0,
    threads=1,
    microbatches=2,
    pictures=Pictures(read_s=0.0001, cpu_s=0.005, packed_s=0.002, raw_s=0.0005),
    evaluation_s=5.0,
    evaluate_every=1000,
    updates_per_epoch=1000,
)


def causes(facts: Facts) -> list[str]:
    return [one.cause for one in advise(facts)]


def first(**changes: Any) -> Any:
    return advise(replace(HEALTHY, **changes))[0]


def test_a_healthy_training_gets_no_advice() -> None:
    assert advise(HEALTHY) == ()
    assert "None of the changes" in Diagnosis.of(HEALTHY).sentence


def waiting(seconds: float) -> tuple[RankFacts, ...]:
    return (RankFacts(64, wait_s=seconds, own_s=1.0),)


def test_without_workers_pictures_and_training_take_turns() -> None:
    found = first(update_s=1.64, ranks=waiting(0.64), compute_s=1.0, workers=0, pictures=Pictures(cpu_s=0.01))
    assert (found.cause, found.arguments) == ("workers", ("--workers", "1"))
    assert found.gain == pytest.approx(1.64, rel=0.01)


def test_where_all_cores_decode_pictures_are_to_be_packed() -> None:
    pictures = Pictures(cpu_s=0.05, packed_s=0.02, raw_s=0.01)
    found = first(update_s=4.2, ranks=waiting(3.2), compute_s=1.0, workers=1, cores=1.0, pictures=pictures)
    assert found.cause == "decoding" and "--raw" in found.change
    assert found.gain == pytest.approx((1.0 + 64 * 0.05) / (1.0 + 64 * 0.01), rel=0.01)


def test_slow_storage_is_told_from_slow_decoding() -> None:
    pictures = Pictures(read_s=0.04, least_read_s=0.04, cpu_s=0.002, packed_s=0.001)
    found = first(update_s=2.688, ranks=waiting(1.7), workers=1, pictures=pictures)
    assert found.cause == "storage"
    assert found.gain == pytest.approx(2.688 / 0.99, rel=0.02)


def test_pictures_in_memory_are_not_advised_on() -> None:
    changes = {"update_s": 1.1, "ranks": waiting(0.1), "workers": 0, "pictures": Pictures(cpu_s=1e-4, in_memory=True)}
    assert advise(replace(HEALTHY, **changes)) == ()


@pytest.mark.parametrize("cause", ["threads", "devices", "microbatch", "precision", "memory_format", "plan"])
def test_a_change_that_was_tried_brings_what_it_brought(cause: Any) -> None:
    found = first(trials=(Trial(cause, ("--x", "1"), seconds=0.5, before_s=1.0),))
    assert (found.cause, found.change) == (cause, "--x 1")
    assert found.gain == pytest.approx(1.0 / (0.01 + 0.495), rel=0.02)


def test_a_larger_batch_counts_by_samples() -> None:
    found = first(trials=(Trial("batch", ("--batch", "128"), 1.0, 1.0, samples=2, another_training=True),))
    assert found.cause == "batch" and found.gain == pytest.approx(2.0, rel=0.02)
    assert (
        advise(
            replace(HEALTHY, trials=(Trial("batch", ("--batch", "128"), 1.9, 1.0, samples=2, another_training=True),))
        )
        == ()
    )


@pytest.mark.parametrize(("seconds", "wanted"), [((1.0, 1.9), "128"), ((1.5, 1.5), "256")])
def test_of_batches_the_smallest_that_brings_nearly_as_much(seconds: tuple[float, float], wanted: str) -> None:
    times = zip((2, 4), seconds, strict=True)
    each = (Trial("batch", ("--batch", str(64 * n)), s, 1.0, samples=n, another_training=True) for n, s in times)
    assert first(trials=tuple(each)).arguments == ("--batch", wanted)


def test_what_computes_faster_does_not_help_where_pictures_are_late() -> None:
    late = {"update_s": 3.2, "ranks": waiting(2.2), "compute_s": 1.0, "workers": 1, "cores": 8.0}
    facts = replace(HEALTHY, **late, pictures=Pictures(cpu_s=0.05), trials=(Trial("precision", ("--x",), 0.5, 1.0),))
    assert causes(facts) == ["workers"]


def test_unequal_devices_get_shares() -> None:
    ranks = RankFacts(32, own_s=0.5), RankFacts(32, own_s=1.0)
    found = first(devices=2, plan="sample=2", ranks=ranks, microbatches=6, evaluation_s=None)
    assert (found.cause, found.arguments) == ("shares", ("--shares", "auto"))
    assert found.gain == pytest.approx(1 / (2 / 3), rel=0.01)
    assert "Rank 1" in found.sentence
    even = tuple(replace(rank, own_s=1.0) for rank in ranks)
    assert advise(replace(HEALTHY, devices=2, ranks=even, microbatches=6)) == ()


def test_a_slow_link_is_said_with_what_would_suffice() -> None:
    ranks = RankFacts(32, own_s=0.3), RankFacts(32, own_s=0.3)
    found = first(
        devices=2,
        ranks=ranks,
        parts={"forward": 0.1, "backward": 0.2, "waiting": 0.7},
        hosts=("a", "b"),
        link_bits_per_s=1e9,
    )
    assert found.cause == "link" and "between a, b" in found.sentence and "in place of 1)" in found.change
    assert found.gain == pytest.approx(1 / (0.3 / 0.95), rel=0.02)


def test_other_processes_on_the_cores_are_named() -> None:
    load = replace(NO_LOAD, waited_s=5.0, others_cores=0.5, others=(OtherProcess("blender", 77, 0.5),))
    found = first(ranks=(RankFacts(64, own_s=0.99, load=load),))
    assert found.cause == "busy" and "blender (process 77)" in found.change
    assert found.gain == pytest.approx(2.0, rel=0.02)
    two = replace(load, others=(OtherProcess("blender", 77, 0.3), OtherProcess("python", 78, 0.2)))
    found = first(ranks=(RankFacts(64, own_s=0.99, load=two),))
    assert "blender (process 77) and 1 other" in found.change


def test_a_quota_is_a_limit() -> None:
    found = first(ranks=(RankFacts(64, own_s=0.99, load=replace(NO_LOAD, cpu_s=6.0, throttled_s=4.0)),))
    assert found.cause == "limit" and found.gain == pytest.approx(1 / 0.6, rel=0.02)


def test_a_quota_counts_once_for_all_cores_and_ranks() -> None:
    threads = replace(NO_LOAD, cores=4.0, cpu_s=20.0, throttled_s=20.0)  # four threads, two cores' time
    assert first(ranks=(RankFacts(64, own_s=0.99, load=threads),)).gain == pytest.approx(2.0, rel=0.02)
    rank = RankFacts(32, own_s=0.99, load=replace(NO_LOAD, cpu_s=5.0, throttled_s=10.0))  # one group has both ranks
    assert first(devices=2, ranks=(rank, rank)).gain == pytest.approx(2.0, rel=0.02)


def test_another_process_on_the_gpu_counts_by_what_it_computes() -> None:
    gpu = GpuLoad({}, 1.0, (GpuProcess("python", 77, 2**30),), 0.0)
    facts = replace(HEALTHY, threads=0, ranks=(RankFacts(64, load=replace(NO_LOAD, gpu=gpu)),))
    assert advise(facts) == ()
    busy = replace(NO_LOAD, gpu=replace(gpu, others_busy=0.5))
    found = advise(replace(facts, ranks=(RankFacts(64, load=busy),)))[0]
    assert (found.cause, found.gain) == ("busy", 1.5) and "python (process 77)" in found.change


def test_stages_that_wait_for_each_other_do_not_wait_for_a_link() -> None:
    ranks = RankFacts(64, own_s=0.7), RankFacts(64, own_s=0.7)
    parts = {"forward": 0.25, "backward": 0.5, "stages": 0.25}
    facts = replace(HEALTHY, devices=2, plan="stage=2", ranks=ranks, threads=0, parts=parts, bubble=0.25)
    assert advise(facts) == ()
    assert causes(replace(facts, bubble=0.05)) == ["link"]


def test_of_a_run_only_pictures_that_a_pack_would_help_are_to_be_packed() -> None:
    late = {"update_s": 1.5, "ranks": waiting(0.5), "compute_s": None, "workers": 1, "cores": 1.0, "pictures": None}
    assert causes(replace(HEALTHY, **late)) == ["decoding"]
    assert causes(replace(HEALTHY, **late, can_pack=False)) == []


def test_memory_that_is_swapped_is_said() -> None:
    load = replace(NO_LOAD, swapped_bytes=2**30, memory_pressure_s=3.0)
    assert first(ranks=(RankFacts(64, own_s=0.99, load=load),)).cause == "swap"


def test_evaluations_that_come_too_often() -> None:
    found = first(evaluate_every=5)
    assert (found.cause, found.arguments) == ("evaluation", ("--set", "evaluate_every=1ep"))
    assert found.gain == pytest.approx(2.0 / 1.005)


def test_checkpoints_that_come_too_often() -> None:
    found = first(checkpoint_s=2.0, checkpoint_every=2)
    assert found.cause == "checkpoint" and found.gain == pytest.approx(2.0, rel=0.03)


def test_a_diagnosis_is_the_same_after_a_file() -> None:
    found = Diagnosis.of(replace(HEALTHY, evaluate_every=5))
    assert Diagnosis.from_document(found.to_document()) == found


def test_workers_on_the_cores_of_the_training_bring_nothing() -> None:
    model = InputModel(
        compute_s=1.0, samples=64, read_s=0.0, least_read_s=0.0, cpu_s=0.01, workers=1, threads=1, cores=1.0
    )
    assert model() == model(workers=4) == pytest.approx(1.64)
    assert model(cores=2.0) == pytest.approx(1.0)
    assert model(workers=0) == pytest.approx(1.64)
    assert model(threads=2, cores=2.0) == pytest.approx(1.64)  # the other thread waits for the one that is late
    assert model(threads=2, cores=2.0, workers=2) == pytest.approx(1.32)


NO_LOAD = HostLoad(
    wall_s=10.0,
    cpu_s=10.0,
    cores=1.0,
    waited_s=0.0,
    throttled_s=0.0,
    others=(),
    others_cores=0.0,
    run_cores=0.0,
    swapped_bytes=0,
    memory_pressure_s=0.0,
    hot_s=None,
    gpu=None,
)
