"""What follows from facts: one broken training for each rule, and a healthy one."""

import json
from dataclasses import replace
from typing import Any

import pytest

from convoy.doctor.advice import Advice, advise
from convoy.doctor.diagnosis import Diagnosis
from convoy.doctor.facts import Facts, InputModel, Pictures, RankFacts, Trial
from convoy.launch.gpu import GpuLoad, GpuProcess
from convoy.launch.host import HostLoad, OtherProcess

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
    late = replace(HEALTHY, notes=("There was no time for --batch 128.",))
    assert Diagnosis.of(late).text() == f"{Diagnosis.of(HEALTHY).text()}\n{late.notes[0]}"


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


@pytest.mark.parametrize("slow", [Pictures(cpu_s=0.0095, raw_s=0.0005), Pictures(read_s=0.02, cpu_s=0.001)])
def test_nothing_is_promised_beyond_what_computing_leaves(slow: Pictures) -> None:
    """Pictures that take longer one by one than in the training: a GPU waits for them a quarter of its time."""
    facts = replace(HEALTHY, batch=256, update_s=0.06, compute_s=0.045, threads=0, workers=16, cores=16.0)
    facts = replace(facts, pictures=slow, ranks=(RankFacts(256, wait_s=0.015),), evaluate_every=None)
    gains = [one.gain for one in advise(facts)]
    assert gains and gains == pytest.approx([0.06 / 0.045] * len(gains))


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


@pytest.mark.parametrize(("seconds", "said"), [(1.7, []), (1.5, ["batch"])])
def test_a_larger_batch_has_to_bring_much(seconds: float, said: list[str]) -> None:
    trial = Trial("batch", ("--batch", "128"), seconds, 1.0, samples=2, another_training=True)
    assert causes(replace(HEALTHY, trials=(trial,))) == said


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
    assert found.sentence.startswith("Other processes, blender (process 77) and 1 other, keep 50 % of the core busy: ")
    found = first(ranks=(RankFacts(64, own_s=0.99, load=replace(two, cores=2.0)),) * 2, devices=2)
    assert " and 1 other, keep 0.5 of 2 cores of rank 0 busy: waiting for a core takes " in found.sentence


def busy_threads(*trials: Trial, threads: int = 2, waited_s: float = 8.0) -> Facts:
    other = OtherProcess("blender", 77, 1.0)
    load = replace(NO_LOAD, cores=2.0, waited_s=waited_s, others_cores=1.0, others=(other,))
    pictures = Pictures(in_memory=True)
    return replace(
        HEALTHY, pictures=pictures, threads=threads, ranks=(RankFacts(64, own_s=0.99, load=load),), trials=trials
    )


def test_what_threads_lose_to_others_is_told_by_fewer_of_them() -> None:
    trial = Trial("threads", ("--set", "threads=1"), 0.25, 1.0, threads=1)
    found = {one.cause: one.gain for one in advise(busy_threads(trial))}
    assert list(found) == ["busy", "threads"]
    assert found["threads"] == pytest.approx(4.0, rel=0.05)
    assert found["busy"] == pytest.approx(4.0 * 2**0.5, rel=0.05)
    half = replace(trial, waited=0.5)  # and waited for a core for half of it
    assert advise(busy_threads(half))[0].gain == pytest.approx(8.0 * 2**0.5, rel=0.05)


def test_without_a_trial_as_much_is_said_of_threads_as_is_sure() -> None:
    assert advise(busy_threads())[0].gain == pytest.approx(1 / (1 - 0.8 * 0.8), rel=0.02)
    assert advise(busy_threads(threads=1, waited_s=5.0))[0].gain == pytest.approx(2.0, rel=0.02)


def test_threads_beyond_the_cores_are_not_the_fault_of_others() -> None:
    trial = Trial("threads", ("--set", "threads=2"), 0.25, 1.0, threads=2)
    found = advise(busy_threads(trial, threads=8, waited_s=0.5))
    assert found[0].cause == "threads" and all(one.gain < 1.1 for one in found[1:])


def test_a_quota_is_a_limit() -> None:
    found = first(ranks=(RankFacts(64, own_s=0.99, load=replace(NO_LOAD, cpu_s=6.0, throttled_s=4.0)),))
    assert found.cause == "limit" and found.gain == pytest.approx(1 / 0.6, rel=0.02)


def test_a_quota_counts_once_for_all_cores_and_ranks() -> None:
    threads = replace(NO_LOAD, cores=4.0, cpu_s=20.0, throttled_s=20.0)  # four threads, two cores' time
    assert first(ranks=(RankFacts(64, own_s=0.99, load=threads),)).gain == pytest.approx(2.0, rel=0.02)
    rank = RankFacts(32, own_s=0.99, load=replace(NO_LOAD, cpu_s=5.0, throttled_s=10.0))  # one group has both ranks
    assert first(devices=2, ranks=(rank, rank)).gain == pytest.approx(2.0, rel=0.02)


def test_another_process_on_the_gpu_counts_by_what_it_computes() -> None:
    gpu = GpuLoad({}, (GpuProcess("python", 77, 2**30),), 0.0)
    facts = replace(HEALTHY, threads=0, ranks=(RankFacts(64, load=replace(NO_LOAD, gpu=gpu)),))
    assert advise(facts) == ()
    busy = replace(NO_LOAD, gpu=replace(gpu, others_busy=0.5))
    found = advise(replace(facts, ranks=(RankFacts(64, load=busy),)))[0]
    assert (found.cause, found.gain) == ("busy", 1.5) and "python (process 77)" in found.change
    hot = replace(NO_LOAD, gpu=replace(gpu, throttled_s={"sw_power_cap": 10.0}))
    found = advise(replace(facts, ranks=(RankFacts(64, load=hot),)))[0]
    assert found.cause == "limit" and found.gain == pytest.approx(1 / 0.9, rel=0.02)


def test_one_device_reads_the_pictures_of_all() -> None:
    """Four ranks' pictures are ready in time, and one rank's are not: there its device waits for them."""
    late = {"devices": 4, "batch": 256, "threads": 0, "cores": 4.0, "workers": 1, "update_s": 0.7, "compute_s": 0.2}
    ranks = tuple(RankFacts(64, wait_s=0.5, own_s=0.2) for _ in range(4))
    alone = Trial("devices", ("--devices", "1"), 0.1, 0.2)
    found = replace(HEALTHY, **late, ranks=ranks, pictures=Pictures(cpu_s=0.01), trials=(alone,))
    assert "devices" not in causes(found)
    assert "devices" in causes(replace(found, pictures=Pictures(in_memory=True), update_s=0.2, ranks=waiting(0.0)))


def test_checkpoints_at_youngs_interval_cost_something_too() -> None:
    found = first(checkpoint_s=20.0, checkpoint_every=100)
    assert found.gain == pytest.approx(1.205 / (1.005 + (20 / (2 * 6 * 3600)) ** 0.5), rel=0.01)


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


@pytest.mark.parametrize(("seconds", "said"), [(0.94, []), (0.85, ["memory_format"])])
def test_what_some_updates_have_shown_has_to_be_much(seconds: float, said: list[str]) -> None:
    assert causes(replace(HEALTHY, trials=(Trial("memory_format", ("--channels-last",), seconds, 1.0),))) == said


def test_memory_that_is_swapped_is_said() -> None:
    load = replace(NO_LOAD, swapped_bytes=2**30, memory_pressure_s=3.0)
    assert first(ranks=(RankFacts(64, own_s=0.99, load=load),)).cause == "swap"


def test_evaluations_that_come_too_often() -> None:
    found = first(evaluate_every=5)
    assert (found.cause, found.arguments) == ("evaluation", ("--set", "evaluate_every=1ep"))
    assert found.gain == pytest.approx(2.0 / 1.005)


@pytest.mark.parametrize(
    ("epochs", "advised"),
    [(100, "evaluate_every=3ep"), (12, "evaluate_every=2ep"), (4, "evaluate_every=1ep")],
)
def test_a_run_keeps_five_evaluations_or_one_an_epoch(epochs: int, advised: str) -> None:
    found = first(evaluate_every=5, updates_per_epoch=100, total_updates=100 * epochs)
    assert found.arguments == ("--set", advised)
    every_epoch = replace(HEALTHY, evaluate_every=100, updates_per_epoch=100, total_updates=400)
    assert causes(every_epoch) == []


def test_an_evaluation_costs_less_where_pictures_are_made_meanwhile() -> None:
    late = replace(HEALTHY, update_s=2.0, ranks=waiting(1.0), evaluate_every=5, ahead=3.0)
    assert late.evaluation_cost_s == pytest.approx(5.0 - 2.5 * 1.0)  # as long as the evaluation takes
    assert replace(late, ahead=1.0).evaluation_cost_s == pytest.approx(5.0 - 1.0)  # as many as there is room for
    assert replace(late, workers=0).evaluation_cost_s == 5.0
    assert late.total_s == pytest.approx(2.0 + 2.5 / 5)


def test_of_an_evaluation_only_the_pictures_get_faster() -> None:
    pictures = Pictures(cpu_s=0.05, raw_s=0.01)
    slow = replace(HEALTHY, update_s=4.2, ranks=waiting(3.2), compute_s=1.0, cores=1.0, pictures=pictures)
    slow = replace(slow, evaluation_s=10.0, evaluate_every=1, updates_per_epoch=1)
    gains = [
        max(one.gain for one in advise(replace(slow, test_samples=number)) if one.cause == "decoding")
        for number in (0, 100, 10_000)
    ]
    update_s, saved_s = 1.64, 100 * 0.04
    assert gains[0] == pytest.approx(14.2 / (update_s + 10.0), rel=0.01)
    assert gains[1] == pytest.approx(14.2 / (update_s + 10.0 - saved_s), rel=0.01)
    assert gains[2] == pytest.approx(14.2 / (update_s + 10.0 * 0.2), rel=0.01)


def test_pictures_that_cost_more_than_is_waited_for_are_told() -> None:
    pictures = Pictures(cpu_s=0.05, raw_s=0.01)
    slow = replace(HEALTHY, update_s=4.2, compute_s=1.0, cores=1.0, pictures=pictures)
    assert (
        "take cores from it: an update takes 4.20 s, and 1.00 s"
        in advise(replace(slow, ranks=waiting(1.0)))[0].sentence
    )
    assert "take cores" not in advise(replace(slow, ranks=waiting(3.2)))[0].sentence


def test_checkpoints_that_come_too_often() -> None:
    found = first(checkpoint_s=2.0, checkpoint_every=2)
    assert found.cause == "checkpoint" and found.gain == pytest.approx(2.0, rel=0.03)


def test_a_diagnosis_is_the_same_after_a_file() -> None:
    found = Diagnosis.of(replace(HEALTHY, evaluate_every=5), (6, 100))
    assert Diagnosis.from_document(found.to_document()) == found
    tried = replace(
        found, advice=tuple(one.tried((1.0, 2.0, 3.0, 4.0)) for one in found.advice), command="convoy train"
    )
    assert tried.advice and Diagnosis.from_document(json.loads(json.dumps(tried.to_document()))) == tried


def test_parts_of_other_updates_add_up_to_the_update() -> None:
    found = Diagnosis.of(HEALTHY)
    assert sum(HEALTHY.parts.values()) == pytest.approx(0.95)
    assert sum(found.parts.values()) == pytest.approx(found.update_s)
    assert found.parts["backward"] == pytest.approx(2 * found.parts["forward"])


@pytest.mark.parametrize("every", [5, 100_000])
def test_the_pace_is_that_of_a_runs_log_and_pauses_are_said(every: int) -> None:
    first = Diagnosis.of(replace(HEALTHY, evaluate_every=every)).text().splitlines()[0]
    pauses = " (32.0 with evaluations and checkpoints)" if every == 5 else ""
    assert first == f"resnet18 on one device: 64.0 images a second{pauses}, 1.00 s for an update of 64"


BATCH = Advice("batch", "--batch 256", ("--batch", "256"), 1.5, "It is small.", another_training=True)


@pytest.mark.parametrize(
    ("turns", "measured", "words"),
    [
        ((100.0, 150.0, 150.0, 100.0), 1.5, ""),
        (
            (100.0, 135.0, 120.0, 70.0),
            1.5,
            "the training as it is made 100 images a second, and later 70.0, so the measured gain",
        ),
        ((100.0, 200.0, 150.0, 100.0), 1.75, "the training with the change made 200 images a second, and later 150"),
        ((100.0, 90.0, 80.0, 100.0), 0.85, "brings nothing here, so leave it out."),
        ((140.0, 90.0, 80.0, 100.0), 0.708, "speed changed meanwhile: the training as it is made 140 images"),
        ((100.0, 310.0, 310.0, 100.0), 3.1, "Prediction and trial are far apart"),
        ((100.0, 290.0, 290.0, 100.0), 2.9, ""),
    ],
)
def test_a_machine_that_slows_down_does_not_look_like_a_bad_change(
    turns: tuple[float, ...], measured: float, words: str
) -> None:
    tried = BATCH.tried(turns)
    assert tried.measured == pytest.approx(measured, abs=0.001)
    assert words in tried.verdict and bool(words) == bool(tried.verdict)
    assert ("brings nothing" in tried.verdict) == (measured == 0.85)


def test_what_cannot_be_bounded_is_said_to_be_at_least_so_much() -> None:
    assert ": at least 20.00 ×" in replace(BATCH, gain=20.0).text and "at least" not in BATCH.text


def test_another_training_is_explained_where_it_is_said() -> None:
    found = replace(Diagnosis.of(HEALTHY), advice=(BATCH,))
    assert "Another training: what is learned changes" in found.text()
    exact = replace(found, advice=(replace(BATCH, another_training=False),))
    assert "nother training" not in exact.text()


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
