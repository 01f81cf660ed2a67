"""What follows from facts: one broken training for each rule, and a healthy one."""

import json
from dataclasses import replace
from typing import Any

import pytest

from convoy.doctor.diagnosis import Advice, Diagnosis, advise
from convoy.doctor.facts import Facts, InputModel, Pictures, RankFacts, Trial
from convoy.launch.host import GpuLoad, GpuProcess, HostLoad, OtherProcess

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
BLENDER = OtherProcess("blender", 77, 0.5)
BUSY = replace(NO_LOAD, waited_s=5.0, others_cores=0.5, others=(BLENDER,))
TWO_BUSY = replace(BUSY, others=(replace(BLENDER, cores=0.3), OtherProcess("python", 78, 0.2)))
GPU = GpuLoad({}, (GpuProcess("python", 77, 2**30),), 0.0)
THREAD = Trial("threads", ("--set", "threads=1"), 0.25, 1.0, threads=1)


def waiting(seconds: float) -> tuple[RankFacts, ...]:
    return (RankFacts(64, wait_s=seconds, own_s=1.0),)


def ranks(*own_s: float) -> tuple[RankFacts, ...]:
    return tuple(RankFacts(32, own_s=seconds) for seconds in own_s)


def loaded(load: HostLoad, devices: int = 1, own_s: float = 0.99, **changes: Any) -> dict[str, Any]:
    return {"ranks": (RankFacts(64 // devices, own_s=own_s, load=load),) * devices, "devices": devices} | changes


def batch(number: int, seconds: float) -> Trial:
    return Trial("batch", ("--batch", str(64 * number)), seconds, 1.0, samples=number, another_training=True)


def busy_threads(*trials: Trial, threads: int = 2, waited_s: float = 8.0) -> dict[str, Any]:
    load = replace(NO_LOAD, cores=2.0, waited_s=waited_s, others_cores=1.0, others=(replace(BLENDER, cores=1.0),))
    return loaded(load, pictures=Pictures(in_memory=True), threads=threads, trials=trials)


SLOW = {"update_s": 4.2, "ranks": waiting(3.2), "compute_s": 1.0, "cores": 1.0}
LATE = {"update_s": 3.2, "ranks": waiting(2.2), "compute_s": 1.0, "cores": 8.0, "pictures": Pictures(cpu_s=0.05)}
STAGES = {"devices": 2, "plan": "stage=2", "ranks": (RankFacts(64, own_s=0.7),) * 2, "threads": 0}
STAGES |= {"parts": {"forward": 0.25, "backward": 0.5, "stages": 0.25}}
OF_RUN = {"update_s": 1.5, "ranks": waiting(0.5), "compute_s": None, "cores": 1.0, "pictures": None}
LINK = {"devices": 2, "ranks": ranks(0.3, 0.3), "parts": {"forward": 0.1, "backward": 0.2, "waiting": 0.7}}
TRIED = 1.0 / (0.01 + 0.495)
"""Of what halves the computing."""

Row = tuple[str, dict[str, Any], str, float | None, tuple[str, ...]]
RULES: list[Row] = [  # what is changed; cause of the first advice, or none; its gain; words of it
    ("without workers pictures and training take turns",
     {"update_s": 1.64, "ranks": waiting(0.64), "compute_s": 1.0, "workers": 0, "pictures": Pictures(cpu_s=0.01)},
     "workers", 1.64, ("--workers 1",)),
    ("where all cores decode pictures are to be packed",
     SLOW | {"pictures": Pictures(cpu_s=0.05, packed_s=0.02, raw_s=0.01)},
     "decoding", (1 + 64 * 0.05) / (1 + 64 * 0.01), ("--raw",)),
    ("slow storage is told from slow decoding",
     {"update_s": 2.688, "ranks": waiting(1.7),
      "pictures": Pictures(read_s=0.04, least_read_s=0.04, cpu_s=0.002, packed_s=0.001)},
     "storage", 2.688 / 0.99, ()),
    ("pictures in memory are not advised on",
     {"update_s": 1.1, "ranks": waiting(0.1), "workers": 0, "pictures": Pictures(cpu_s=1e-4, in_memory=True)},
     "", None, ()),
    ("of a run only pictures that a pack would help are to be packed", OF_RUN, "decoding", None, ()),
    ("and no others", OF_RUN | {"can_pack": False}, "", None, ()),
    ("what computes faster does not help where pictures are late",
     LATE | {"trials": (Trial("precision", ("--x",), 0.5, 1.0),)}, "workers", None, ()),
    *((f"{cause} that was tried brings what it brought", {"trials": (Trial(cause, ("--x", "1"), 0.5, 1.0),)},  # type: ignore[arg-type]
       cause, TRIED, ("--x 1",))
      for cause in ("threads", "devices", "microbatch", "precision", "memory_format", "plan")),
    ("what some updates have shown has to be much",
     {"trials": (Trial("memory_format", ("--channels-last",), 0.94, 1.0),)}, "", None, ()),
    ("a larger batch counts by samples", {"trials": (batch(2, 1.0),)}, "batch", 2.0, ("--batch 128",)),
    ("and has to bring much", {"trials": (batch(2, 1.7),)}, "", None, ()),
    ("as this one does", {"trials": (batch(2, 1.5),)}, "batch", None, ()),
    ("of batches the smallest that brings nearly as much", {"trials": (batch(2, 1.0), batch(4, 1.9))},
     "batch", None, ("--batch 128",)),
    ("and no smaller", {"trials": (batch(2, 1.5), batch(4, 1.5))}, "batch", None, ("--batch 256",)),
    ("unequal devices get shares",
     {"devices": 2, "plan": "sample=2", "ranks": ranks(0.5, 1.0), "microbatches": 6, "evaluation_s": None},
     "shares", 1.5, ("--shares auto", "Rank 1")),
    ("equal ones none", {"devices": 2, "ranks": ranks(1.0, 1.0), "microbatches": 6}, "", None, ()),
    ("a slow link is said with what would suffice", LINK | {"hosts": ("a", "b"), "link_bits_per_s": 1e9},
     "link", 1 / (0.3 / 0.95), ("between a, b", "in place of 1)")),
    ("stages that wait for each other do not wait for a link", STAGES | {"bubble": 0.25}, "", None, ()),
    ("but those that wait longer do", STAGES | {"bubble": 0.05}, "link", None, ()),
    ("other processes on the cores are named", loaded(BUSY), "busy", 2.0, ("blender (process 77)",)),
    ("and counted", loaded(TWO_BUSY), "busy", None,
     ("Other processes, blender (process 77) and 1 other, keep 50 % of the core busy: ",)),
    ("on several cores too", loaded(replace(TWO_BUSY, cores=2.0), 2), "busy", None,
     (" and 1 other, keep 0.5 of 2 cores of rank 0 busy: waiting for a core takes ",)),
    ("what threads lose to others is told by fewer of them", busy_threads(THREAD), "busy", 4.0 * 2**0.5, ()),
    ("also where these waited", busy_threads(replace(THREAD, waited=0.5)), "busy", 8.0 * 2**0.5, ()),
    ("without a trial as much is said of threads as is sure", busy_threads(), "busy", 1 / (1 - 0.8 * 0.8), ()),
    ("which is all of one", busy_threads(threads=1, waited_s=5.0), "busy", 2.0, ()),
    ("threads beyond the cores are not the fault of others",
     busy_threads(replace(THREAD, arguments=("--set", "threads=2"), threads=2), threads=8, waited_s=0.5),
     "threads", None, ()),
    ("a quota is a limit", loaded(replace(NO_LOAD, cpu_s=6.0, throttled_s=4.0)), "limit", 1 / 0.6, ()),
    ("it counts once for all cores", loaded(replace(NO_LOAD, cores=4.0, cpu_s=20.0, throttled_s=20.0)),
     "limit", 2.0, ()),  # four threads, two cores' time
    ("and ranks of a group", loaded(replace(NO_LOAD, cpu_s=5.0, throttled_s=10.0), 2), "limit", 2.0, ()),
    ("a process on the GPU that computes nothing costs nothing",
     loaded(replace(NO_LOAD, gpu=GPU), own_s=0.0, threads=0), "", None, ()),
    ("one that does is named", loaded(replace(NO_LOAD, gpu=replace(GPU, others_busy=0.5)), own_s=0.0, threads=0),
     "busy", 1.5, ("python (process 77)",)),
    ("a GPU that is throttled is a limit",
     loaded(replace(NO_LOAD, gpu=replace(GPU, throttled_s={"sw_power_cap": 10.0})), own_s=0.0, threads=0),
     "limit", 1 / 0.9, ()),
    ("memory that is swapped is said", loaded(replace(NO_LOAD, swapped_bytes=2**30, memory_pressure_s=3.0)),
     "swap", None, ()),
    ("evaluations that come too often", {"evaluate_every": 5}, "evaluation", 2.0 / 1.005, ("evaluate_every=1ep",)),
    *((f"of {epochs} epochs five are evaluated, or each",
       {"evaluate_every": 5, "updates_per_epoch": 100, "total_updates": 100 * epochs}, "evaluation", None, (words,))
      for epochs, words in ((100, "evaluate_every=3ep"), (12, "evaluate_every=2ep"), (4, "evaluate_every=1ep"))),
    ("every epoch is not too often", {"evaluate_every": 100, "updates_per_epoch": 100, "total_updates": 400},
     "", None, ()),
    ("checkpoints that come too often", {"checkpoint_s": 2.0, "checkpoint_every": 2}, "checkpoint", 2.0, ()),
    ("those at Young's interval cost something too", {"checkpoint_s": 20.0, "checkpoint_every": 100},
     "checkpoint", 1.205 / (1.005 + (20 / (2 * 6 * 3600)) ** 0.5), ()),
]  # fmt: skip


def test_every_rule() -> None:
    for rule, changes, cause, gain, words in RULES:
        found = advise(replace(HEALTHY, **changes))
        assert [one.cause for one in found][:1] == ([cause] if cause else []), rule
        text = f"{found[0].change} {found[0].sentence} {' '.join(found[0].arguments)}" if found else ""
        assert all(word in text for word in words), f"{rule}: {text}"
        assert gain is None or found[0].gain == pytest.approx(gain, rel=0.05 if "threads" in changes else 0.03), rule


def test_a_healthy_training_gets_no_advice() -> None:
    assert advise(HEALTHY) == ()
    assert "None of the changes" in Diagnosis.of(HEALTHY).sentence
    late = replace(HEALTHY, notes=("There was no time for --batch 128.",))
    assert Diagnosis.of(late).text() == f"{Diagnosis.of(HEALTHY).text()}\n{late.notes[0]}"


def test_what_several_rules_say_is_bounded_by_what_computing_leaves() -> None:
    """Pictures that take longer one by one than in the training: a GPU waits for them a quarter of its time."""
    facts = replace(HEALTHY, batch=256, update_s=0.06, compute_s=0.045, threads=0, workers=16, cores=16.0)
    facts = replace(facts, ranks=(RankFacts(256, wait_s=0.015),), evaluate_every=None)
    for slow in (Pictures(cpu_s=0.0095, raw_s=0.0005), Pictures(read_s=0.02, cpu_s=0.001)):
        gains = [one.gain for one in advise(replace(facts, pictures=slow))]
        assert gains and gains == pytest.approx([0.06 / 0.045] * len(gains))
    found = {one.cause: one.gain for one in advise(replace(HEALTHY, **busy_threads(THREAD)))}
    assert list(found) == ["busy", "threads"] and found["threads"] == pytest.approx(4.0, rel=0.05)
    beyond = replace(THREAD, arguments=("--set", "threads=2"), threads=2)
    others = advise(replace(HEALTHY, **busy_threads(beyond, threads=8, waited_s=0.5)))[1:]
    assert all(one.gain < 1.1 for one in others)


def test_one_device_reads_the_pictures_of_all() -> None:
    """Four ranks' pictures are ready in time, and one rank's are not: there its device waits for them."""
    late = {"devices": 4, "batch": 256, "threads": 0, "cores": 4.0, "workers": 1, "update_s": 0.7, "compute_s": 0.2}
    alone = Trial("devices", ("--devices", "1"), 0.1, 0.2)
    facts = replace(HEALTHY, **late, ranks=(RankFacts(64, wait_s=0.5, own_s=0.2),) * 4, trials=(alone,))
    in_memory = replace(facts, pictures=Pictures(in_memory=True), update_s=0.2, ranks=waiting(0.0))
    for each, is_advised in ((replace(facts, pictures=Pictures(cpu_s=0.01)), False), (in_memory, True)):
        assert ("devices" in [one.cause for one in advise(each)]) == is_advised


def test_an_evaluation_costs_less_where_pictures_are_made_meanwhile() -> None:
    late = replace(HEALTHY, update_s=2.0, ranks=waiting(1.0), evaluate_every=5, ahead=3.0)
    assert late.evaluation_cost_s == pytest.approx(5.0 - 2.5 * 1.0)  # as long as the evaluation takes
    assert replace(late, ahead=1.0).evaluation_cost_s == pytest.approx(5.0 - 1.0)  # as many as there is room for
    assert replace(late, workers=0).evaluation_cost_s == 5.0
    assert late.total_s == pytest.approx(2.0 + 2.5 / 5)
    slow = replace(HEALTHY, **SLOW, pictures=Pictures(cpu_s=0.05, raw_s=0.01))
    slow = replace(slow, evaluation_s=10.0, evaluate_every=1, updates_per_epoch=1)
    for number, seconds in ((0, 10.0), (100, 10.0 - 100 * 0.04), (10_000, 10.0 * 0.2)):  # only the pictures get faster
        gains = [one.gain for one in advise(replace(slow, test_samples=number)) if one.cause == "decoding"]
        assert max(gains) == pytest.approx(14.2 / (1.64 + seconds), rel=0.01)


def test_pictures_that_cost_more_than_is_waited_for_are_told() -> None:
    slow = replace(HEALTHY, **SLOW, pictures=Pictures(cpu_s=0.05, raw_s=0.01))
    words = "take cores from it: an update takes 4.20 s, and 1.00 s"
    assert words in advise(replace(slow, ranks=waiting(1.0)))[0].sentence
    assert "take cores" not in advise(slow)[0].sentence


def test_workers_on_the_cores_of_the_training_bring_nothing() -> None:
    model = InputModel(
        compute_s=1.0, samples=64, read_s=0.0, least_read_s=0.0, cpu_s=0.01, workers=1, threads=1, cores=1.0
    )
    assert model() == model(workers=4) == pytest.approx(1.64) and model(workers=0) == pytest.approx(1.64)
    assert model(cores=2.0) == pytest.approx(1.0)
    assert model(threads=2, cores=2.0) == pytest.approx(1.64)  # the other thread waits for the one that is late
    assert model(threads=2, cores=2.0, workers=2) == pytest.approx(1.32)


BATCH = Advice("batch", "--batch 256", ("--batch", "256"), 1.5, "It is small.", another_training=True)


def test_a_diagnosis_says_pace_parts_and_what_changes_and_is_the_same_after_a_file() -> None:
    found = Diagnosis.of(replace(HEALTHY, evaluate_every=5), (6, 100))
    assert Diagnosis.from_document(found.to_document()) == found
    tried = tuple(one.tried((1.0, 2.0, 3.0, 4.0)) for one in found.advice)
    ready = replace(found, advice=tried, command="convoy train")
    assert tried and Diagnosis.from_document(json.loads(json.dumps(ready.to_document()))) == ready
    healthy = Diagnosis.of(HEALTHY)
    assert sum(HEALTHY.parts.values()) == pytest.approx(0.95)  # of other updates: they add up to this one
    assert sum(healthy.parts.values()) == pytest.approx(healthy.update_s)
    assert healthy.parts["backward"] == pytest.approx(2 * healthy.parts["forward"])
    for every, pauses in ((5, " (32.0 with evaluations and checkpoints)"), (100_000, "")):
        first = Diagnosis.of(replace(HEALTHY, evaluate_every=every)).text().splitlines()[0]
        assert first == f"resnet18 on one device: 64.0 images a second{pauses}, 1.00 s for an update of 64"
    assert "Another training: what is learned changes" in replace(healthy, advice=(BATCH,)).text()
    exact = replace(healthy, advice=(replace(BATCH, another_training=False),))
    assert "nother training" not in exact.text()
    assert ": at least 20.00 ×" in replace(BATCH, gain=20.0).text and "at least" not in BATCH.text


def test_a_machine_that_slows_down_does_not_look_like_a_bad_change() -> None:
    slower = "the training as it is made 100 images a second, and later 70.0, so the measured gain"
    changed = "the training with the change made 200 images a second, and later 150"
    for turns, measured, words in (
        ((100.0, 150.0, 150.0, 100.0), 1.5, ""),
        ((100.0, 135.0, 120.0, 70.0), 1.5, slower),
        ((100.0, 200.0, 150.0, 100.0), 1.75, changed),
        ((100.0, 90.0, 80.0, 100.0), 0.85, "brings nothing here, so leave it out."),
        ((140.0, 90.0, 80.0, 100.0), 0.708, "speed changed meanwhile: the training as it is made 140 images"),
        ((100.0, 310.0, 310.0, 100.0), 3.1, "Prediction and trial are far apart"),
        ((100.0, 290.0, 290.0, 100.0), 2.9, ""),
    ):
        tried = BATCH.tried(turns)
        assert tried.measured == pytest.approx(measured, abs=0.001)
        assert words in tried.verdict and bool(words) == bool(tried.verdict)
        assert ("brings nothing" in tried.verdict) == (measured == 0.85)
