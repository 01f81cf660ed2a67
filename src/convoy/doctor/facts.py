"""What was measured of a training: the doctor's rules see this and nothing else."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from convoy.launch.host import HostLoad

Cause = Literal[
    "workers",
    "storage",
    "decoding",
    "batch",
    "microbatch",
    "plan",
    "link",
    "shares",
    "precision",
    "memory_format",
    "compile",
    "threads",
    "busy",
    "limit",
    "swap",
    "devices",
    "evaluation",
    "checkpoint",
]
"""What can hold a training back."""


@dataclass(frozen=True)
class Pictures:
    """What making one picture for a batch takes in one process, in seconds.

    Attributes:
        read_s: time for which its bytes are waited for.
        least_read_s: the same where several are read at once, divided by their number: the storage gives no more.
        cpu_s: processor time to read, decode and augment it.
        packed_s: `cpu_s` once `convoy data pack` has stored it with `short_side`; None where that was not tried.
        raw_s: `cpu_s` from a pack of raw pixels.
        turbo_s: `cpu_s` with the decoder by libjpeg-turbo; None where it is in use already, or not installed.
        in_memory: whether pictures lie decoded in memory, where one is only copied.
        short_side: the short side of packed pictures, in pixels.
    """

    read_s: float = 0.0
    least_read_s: float = 0.0
    cpu_s: float = 0.0
    packed_s: float | None = None
    raw_s: float | None = None
    turbo_s: float | None = None
    in_memory: bool = False
    short_side: int = 256


@dataclass(frozen=True)
class RankFacts:
    """One rank's part of an update.

    Attributes:
        samples: how many of a global batch it computes.
        wait_s: seconds for which it waits for its batch, as a mean over the updates.
        own_s: seconds of its own work, without waits for other ranks; 0 where that is not known, as on a GPU.
        load: what its host did meanwhile; None where nobody looked.
    """

    samples: int
    wait_s: float = 0.0
    own_s: float = 0.0
    load: HostLoad | None = None


@dataclass(frozen=True)
class Trial:
    """Updates with one thing changed, beside those of the training as it is; without their input.

    Attributes:
        cause: what the change would mend.
        arguments: arguments of the command line that make the change.
        seconds: seconds of an update with the change.
        before_s: seconds of an update as it is, measured in turns with it.
        samples: how many times as many samples an update with the change has.
        another_training: whether it is a change of the experiment, of what is learned or of its last bits.
        threads: threads with which each rank computes, where the change is another number of them.
        waited: part of the time with the change in which threads waited for a core.
    """

    cause: Cause
    arguments: tuple[str, ...]
    seconds: float
    before_s: float
    samples: float = 1.0
    another_training: bool = False
    threads: int | None = None
    waited: float = 0.0

    @property
    def gain(self) -> float:
        """How many times as many samples a second there are with the change."""
        return self.samples * self.before_s / self.seconds if self.seconds else 1.0


@dataclass(frozen=True)
class Facts:
    """What was measured of a training as it runs.

    Attributes:
        update_s: seconds of an update of the slowest rank, with its input, without pauses.
        parts: seconds of an update by name (`convoy.plans.timeline.PARTS`), of one rank.
        ranks: every rank's part.
        compute_s: seconds of an update whose input is ready; None where that was not measured apart.
        workers: processes of each rank that make pictures ready; 0 where the rank does it itself.
        cores: cores that each rank's processes may use together.
        threads: threads with which each rank computes; 0 on a GPU.
        microbatches: microbatches of an update, all ranks together.
        pictures: what making a picture takes; None where nobody looked.
        can_pack: whether a pack may make their decoding faster: they are compressed, and not from a pack.
        trials: changes that were tried.
        evaluation_s, checkpoint_s: seconds that one takes, in which nothing is trained; None where that is not known.
        test_samples: pictures that a rank reads for an evaluation.
        ahead: batches that workers make before they are asked for, at most.
        evaluate_every, checkpoint_every: updates between two of them; None where it is measured how often they come.
        updates_per_epoch, total_updates: updates of an epoch and of the run.
        mtbf_s: mean time between failures, from which `checkpoint.every=auto` follows.
        hosts: the hosts of the ranks; empty with one rank.
        link_bits_per_s: bits a second that an all-reduce of all ranks moves each way; None where nobody looked.
        bubble: part of an update in which a stage has nothing to do, however fast its link is.
        notes: sentences on what there was no time for.
    """

    model: str
    data: str
    devices: int
    plan: str
    batch: int
    update_s: float
    ranks: tuple[RankFacts, ...]
    parts: dict[str, float] = field(default_factory=dict)
    compute_s: float | None = None
    workers: int = 0
    cores: float = 1.0
    threads: int = 1
    microbatches: int = 1
    pictures: Pictures | None = None
    can_pack: bool = True
    trials: tuple[Trial, ...] = ()
    evaluation_s: float | None = None
    evaluate_every: int | None = None
    test_samples: int = 0
    ahead: float = 0.0
    checkpoint_s: float | None = None
    checkpoint_every: int | None = None
    updates_per_epoch: int = 1
    total_updates: int = 1
    mtbf_s: float = 6 * 3600.0
    hosts: tuple[str, ...] = ()
    link_bits_per_s: float | None = None
    bubble: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def wait_s(self) -> float:
        """Seconds of an update in which the rank that waits longest waits for its batch."""
        return max(rank.wait_s for rank in self.ranks)

    @property
    def evaluation_cost_s(self) -> float:
        """Seconds by which an evaluation delays training: the batches that workers make meanwhile are not waited for
        later."""
        taken = self.evaluation_s or 0.0
        made = min(self.ahead, taken / self.update_s) if self.workers else 0.0
        return max(0.0, taken - made * self.wait_s)

    @property
    def pauses_s(self) -> float:
        """Seconds by which evaluations and checkpoints delay training, for each update."""
        pairs = (self.evaluation_cost_s, self.evaluate_every), (self.checkpoint_s, self.checkpoint_every)
        return sum((seconds or 0.0) / every for seconds, every in pairs if every)

    @property
    def total_s(self) -> float:
        """Seconds for each update, pauses included."""
        return self.update_s + self.pauses_s

    @property
    def images_per_s(self) -> float:
        """Training images a second, pauses included."""
        return self.batch / self.total_s if self.total_s else 0.0

    @property
    def exchange_s(self) -> float:
        """Seconds of an update in which a rank waits for what other ranks send, though they could have sent it."""
        return self.update_s * (self.share("waiting") + max(0.0, self.share("stages") - self.bubble))

    def share(self, part: str) -> float:
        """A part of an update as a share of it: updates whose parts are looked at take longer than others."""
        return self.parts[part] / sum(self.parts.values()) if self.parts.get(part) else 0.0


@dataclass(frozen=True)
class InputModel:
    """How long an update is, as it follows from what it computes and from how its pictures are made.

    Workers make pictures while the rank computes: an update takes as long as the slower of both. Where they share the
    cores of threads that compute, these are late, and the others wait for them. Without workers one follows the other.

    Attributes:
        compute_s: seconds of an update whose input is ready.
        samples: how many a rank computes in an update.
        read_s, least_read_s, cpu_s: what a picture takes (`Pictures`).
        workers: processes that make pictures; 0 where the rank does it itself.
        threads: threads that compute on the cores; 0 where a GPU does.
        cores: cores of threads and workers together.
    """

    compute_s: float
    samples: int
    read_s: float
    least_read_s: float
    cpu_s: float
    workers: int
    threads: float
    cores: float

    def __call__(self, **changes: Any) -> float:
        """Seconds of an update, with some attributes changed."""
        one = replace(self, **changes)
        made = one.samples * (one.read_s + one.cpu_s)
        if not one.workers:
            return one.compute_s + made
        shared, work = min(one.threads, one.cores), one.samples * one.cpu_s
        if shared:  # a thread that shares its core is late, and all others wait for it
            slowed = min(one.workers, shared)
            shared_s = (one.compute_s + work / slowed) / (1 + (one.cores - shared) / slowed)
        else:
            shared_s = work / one.cores
        return max(one.compute_s, made / one.workers, one.samples * one.least_read_s, shared_s)

    @property
    def picture_s(self) -> float:
        """Seconds in which one more picture is made."""
        return (self.read_s + self.cpu_s) / max(1, self.workers)

    @property
    def most_workers(self) -> int:
        """The number of workers from which on more bring nothing."""
        numbers: Sequence[int] = range(1, max(2, 4 * math.ceil(self.cores)) + 1)
        best = min(self(workers=number) for number in numbers)
        return next(number for number in numbers if self(workers=number) <= 1.02 * best)
