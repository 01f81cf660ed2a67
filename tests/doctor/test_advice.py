"""What follows from facts: one broken training for each cause, and a healthy one."""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from pydantic import TypeAdapter

from convoy.doctor.diagnosis import Advice, Diagnosis, advise
from convoy.doctor.facts import Cause, Facts, Pictures, RankFacts, Trial
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
NO_LOAD = HostLoad(10.0, 10.0, 1.0, 0.0, 0.0, (), 0.0, 0.0, 0, 0.0, None)
BLENDER = OtherProcess("blender", 77, 0.5)
BUSY = replace(NO_LOAD, waited_s=5.0, others_cores=0.5, others=(BLENDER,))
THREAD = Trial("threads", ("--set", "threads=1"), {"threads": 1}, seconds=0.25, before_s=1.0)


def waiting(seconds: float) -> tuple[RankFacts, ...]:
    return (RankFacts(64, wait_s=seconds, own_s=1.0),)


def ranks(*own_s: float) -> tuple[RankFacts, ...]:
    return tuple(RankFacts(32, own_s=seconds) for seconds in own_s)


def loaded(load: HostLoad, **changes: Any) -> dict[str, Any]:
    return {"ranks": (RankFacts(64, own_s=0.99, load=load),)} | changes


def tried(cause: Cause, seconds: float = 0.5) -> dict[str, Any]:
    return {"trials": (Trial(cause, ("--x", "1"), seconds=seconds, before_s=1.0),)}


def batch(number: int, seconds: float) -> Trial:
    arguments = ("--batch", str(64 * number))
    return Trial("batch", arguments, samples=number, another_training=True, seconds=seconds, before_s=1.0)


def busy_threads(*trials: Trial) -> dict[str, Any]:
    load = replace(NO_LOAD, cores=2.0, waited_s=8.0, others_cores=1.0, others=(replace(BLENDER, cores=1.0),))
    return loaded(load, pictures=Pictures(in_memory=True), threads=2, trials=trials)


SLOW = {"update_s": 4.2, "ranks": waiting(3.2), "compute_s": 1.0, "cores": 1.0}
STAGES = {"devices": 2, "plan": "stage=2", "ranks": (RankFacts(64, own_s=0.7),) * 2, "threads": 0}
STAGES |= {"parts": {"forward": 0.25, "backward": 0.5, "stages": 0.25}}
LINK = {"devices": 2, "ranks": ranks(0.3, 0.3), "parts": {"forward": 0.1, "backward": 0.2, "waiting": 0.7}}
OF_RUN = {"update_s": 1.5, "ranks": waiting(0.5), "compute_s": None, "cores": 1.0, "pictures": None}

Row = tuple[dict[str, Any], str, float | None, tuple[str, ...]]
RULES: list[Row] = [  # what is changed; cause of the first advice, or none; its gain; words of it
    # Without workers pictures and training take turns.
    ({"update_s": 1.64, "ranks": waiting(0.64), "compute_s": 1.0, "workers": 0, "pictures": Pictures(cpu_s=0.01)},
     "workers", 1.64, ("--workers 1",)),
    (SLOW | {"pictures": Pictures(cpu_s=0.05, packed_s=0.02, raw_s=0.01)},
     "decoding", (1 + 64 * 0.05) / (1 + 64 * 0.01), ("--raw",)),
    ({"update_s": 2.688, "ranks": waiting(1.7),
      "pictures": Pictures(read_s=0.04, least_read_s=0.04, cpu_s=0.002, packed_s=0.001)},
     "storage", 2.688 / 0.99, ()),
    ({"update_s": 1.1, "ranks": waiting(0.1), "workers": 0, "pictures": Pictures(cpu_s=1e-4, in_memory=True)},
     "", None, ()),
    (OF_RUN, "decoding", None, ()),
    (OF_RUN | {"can_pack": False}, "", None, ()),
    *((tried(cause), cause, 1.0 / (0.01 + 0.495), ("--x 1",))
      for cause in ("threads", "devices", "microbatch", "precision", "memory_format", "plan")),
    (tried("memory_format", 0.94), "", None, ()),  # what some updates have shown has to be much
    # A larger batch counts by samples; of several the smallest that brings nearly as much.
    ({"trials": (batch(2, 1.0), batch(4, 1.9))}, "batch", 2.0, ("--batch 128",)),
    ({"trials": (batch(2, 1.7),)}, "", None, ()),
    ({"devices": 2, "plan": "sample=2", "ranks": ranks(0.5, 1.0), "microbatches": 6, "evaluation_s": None},
     "shares", 1.5, ("--shares auto", "Rank 1")),
    ({"devices": 2, "ranks": ranks(1.0, 1.0), "microbatches": 6}, "", None, ()),
    (LINK | {"hosts": ("a", "b"), "link_bits_per_s": 1e9},
     "link", 1 / (0.3 / 0.95), ("between a, b", "in place of 1)")),
    # Stages that wait for each other do not wait for a link, but those that wait longer do.
    (STAGES | {"bubble": 0.25}, "", None, ()),
    (STAGES | {"bubble": 0.05}, "link", None, ()),
    (loaded(BUSY), "busy", 2.0, ("blender (process 77)",)),
    # What threads lose to others is told by fewer of them; without a trial as much is said as is sure.
    (busy_threads(THREAD), "busy", 4.0 * 2**0.5, ()),
    (busy_threads(), "busy", 1 / (1 - 0.8 * 0.8), ()),
    (loaded(replace(NO_LOAD, cpu_s=6.0, throttled_s=4.0)), "limit", 1 / 0.6, ()),
    (loaded(replace(NO_LOAD, swapped_bytes=2**30, memory_pressure_s=3.0)), "swap", None, ()),
    ({"evaluate_every": 5}, "evaluation", 2.0 / 1.005, ("evaluate_every=1ep",)),
    ({"evaluate_every": 5, "updates_per_epoch": 100, "total_updates": 1200}, "evaluation", None, ("=2ep",)),
    ({"checkpoint_s": 2.0, "checkpoint_every": 2}, "checkpoint", 2.0, ()),
]  # fmt: skip


def test_every_rule() -> None:
    for changes, cause, gain, words in RULES:
        found = advise(replace(HEALTHY, **changes))
        assert [one.cause for one in found][:1] == ([cause] if cause else []), changes
        text = f"{found[0].change} {found[0].sentence} {' '.join(found[0].arguments)}" if found else ""
        assert all(word in text for word in words), f"{changes}: {text}"
        assert gain is None or found[0].gain == pytest.approx(gain, rel=0.05 if "threads" in changes else 0.03), changes
    assert advise(HEALTHY) == () and "None of the changes" in Diagnosis.of(HEALTHY).sentence


BATCH = Advice("batch", "--batch 256", ("--batch", "256"), 1.5, "It is small.", another_training=True)


def test_a_diagnosis_says_pace_and_parts_and_is_the_same_after_a_file() -> None:
    found = Diagnosis.of(replace(HEALTHY, evaluate_every=5), (6, 100))
    ready = replace(
        found, advice=tuple(one.tried((1.0, 2.0, 3.0, 4.0)) for one in found.advice), command="convoy train"
    )
    assert ready.advice and TypeAdapter(Diagnosis).validate_json(json.dumps(asdict(ready))) == ready
    assert sum(HEALTHY.parts.values()) == pytest.approx(0.95)  # of other updates: they add up to this one
    assert sum(Diagnosis.of(HEALTHY).parts.values()) == pytest.approx(1.0)
    first = found.text().splitlines()[0]
    assert first.endswith(": 64.0 images a second (32.0 with evaluations and checkpoints), 1.00 s for an update of 64")
    assert "Another training: what is learned changes" in replace(found, advice=(BATCH,)).text()


def test_a_machine_that_slows_down_does_not_look_like_a_bad_change() -> None:
    for turns, measured, words in (
        ((100.0, 150.0, 150.0, 100.0), 1.5, ""),
        ((100.0, 135.0, 120.0, 70.0), 1.5, "the training as it is made 100 images a second, and later 70.0, so the"),
        ((100.0, 90.0, 80.0, 100.0), 0.85, "brings nothing here, so leave it out."),
        ((100.0, 310.0, 310.0, 100.0), 3.1, "Prediction and trial are far apart"),
    ):
        tried = BATCH.tried(turns)
        assert tried.measured == pytest.approx(measured, abs=0.001)
        assert words in tried.verdict and bool(words) == bool(tried.verdict)
