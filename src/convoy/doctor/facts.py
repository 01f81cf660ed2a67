"""What was measured of a training: the doctor's rules see this and nothing else."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from convoy.launch.host import HostLoad

# What can hold a training back.
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


@dataclass(frozen=True)
class Pictures:
    """What making one picture for a batch takes in one process, in seconds."""

    read_s: float = 0.0  # time for which its bytes are waited for
    least_read_s: float = 0.0  # the same where several are read at once, by their number: the storage gives no more
    cpu_s: float = 0.0  # processor time to read, decode and augment it
    packed_s: float | None = None  # `cpu_s` from a pack with `short_side`; None where that was not tried
    raw_s: float | None = None  # `cpu_s` from a pack of raw pixels
    turbo_s: float | None = None  # `cpu_s` by libjpeg-turbo; None where it is in use already, or not installed
    in_memory: bool = False  # whether pictures lie decoded in memory, where one is only copied
    short_side: int = 256  # of packed pictures, in pixels


@dataclass(frozen=True)
class RankFacts:
    """One rank's part of an update."""

    samples: int  # of a global batch
    wait_s: float = 0.0  # seconds for which it waits for its batch, as a mean over the updates
    own_s: float = 0.0  # seconds without waits for other ranks; 0 where that is not known, as on a GPU
    load: HostLoad | None = None  # of its host meanwhile; None where nobody looked


@dataclass(frozen=True)
class Change:
    """A change to try."""

    cause: Cause  # what it would mend
    arguments: tuple[str, ...]  # of the command line that make it
    settings: dict[str, Any] = field(default_factory=dict)  # the recipe's fields that make it
    samples: int = 1  # how many times as many samples an update has with it
    another_training: bool = False  # it changes what is learned, or its last bits
    alone: bool = False  # one device tries it, with the cores of all


@dataclass(frozen=True, kw_only=True)
class Trial(Change):
    """Updates with a change, beside those of the training as it is; without their input."""

    seconds: float  # of an update with the change
    before_s: float  # of an update as it is, measured in turns with it
    waited: float = 0.0  # part of the time with the change in which threads waited for a core

    @property
    def threads(self) -> int | None:
        """Of each rank, where their number is the change."""
        return self.settings.get("threads")


@dataclass(frozen=True)
class Facts:
    """What was measured of a training as it runs."""

    model: str
    data: str
    devices: int
    plan: str
    batch: int
    update_s: float  # of the slowest rank, with its input, without pauses
    ranks: tuple[RankFacts, ...]
    parts: dict[str, float] = field(default_factory=dict)  # seconds of one rank by name (`convoy.plans.timeline.PARTS`)
    compute_s: float | None = None  # of an update whose input is ready; None where not measured
    workers: int = 0  # processes of each rank that make pictures; 0 where the rank does it
    cores: float = 1.0  # that each rank's processes may use together
    threads: int = 1  # with which each rank computes; 0 on a GPU
    microbatches: int = 1  # of an update, all ranks together
    pictures: Pictures | None = None  # None where nobody looked
    can_pack: bool = True  # pictures are compressed, and not from a pack, so that one may help
    trials: tuple[Trial, ...] = ()
    evaluation_s: float | None = None  # seconds of one; None where not known
    evaluate_every: int | None = None  # updates; None where that was measured
    test_samples: int = 0  # that a rank reads for an evaluation
    ahead: float = 0.0  # batches that workers make before they are asked for, at most
    checkpoint_s: float | None = None  # seconds of one; None where not known
    checkpoint_every: int | None = None  # updates; None where that was measured
    updates_per_epoch: int = 1
    total_updates: int = 1
    mtbf_s: float = 6 * 3600.0  # mean time between failures, for `checkpoint.every=auto`
    hosts: tuple[str, ...] = ()  # of the ranks; empty with one rank
    link_bits_per_s: float | None = None  # each way in an all-reduce of all ranks; None where nobody looked
    bubble: float = 0.0  # part of an update in which a stage has nothing to do, with any link
    notes: tuple[str, ...] = ()  # sentences on what there was no time for

    @property
    def wait_s(self) -> float:
        """Seconds of an update in which the rank that waits longest waits for its batch."""
        return max(rank.wait_s for rank in self.ranks)

    @property
    def evaluation_cost_s(self) -> float:
        """Seconds by which an evaluation delays training: the batches that workers make meanwhile are not waited for
        later."""
        pause_s = self.evaluation_s or 0.0
        batches = min(self.ahead, pause_s / self.update_s) if self.workers else 0.0
        return max(0.0, pause_s - batches * self.wait_s)

    @property
    def pauses_s(self) -> float:
        """Seconds by which evaluations and checkpoints delay training, for each update."""
        pairs = (self.evaluation_cost_s, self.evaluate_every), (self.checkpoint_s, self.checkpoint_every)
        return sum((seconds or 0.0) / every for seconds, every in pairs if every)

    @property
    def total_s(self) -> float:
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
    (To try workers or a pack would take a worker's start, or the packing of a data set.)
    """

    compute_s: float  # of an update whose input is ready
    samples: int  # of a rank in an update
    read_s: float  # this and the next two as in `Pictures`
    least_read_s: float
    cpu_s: float
    workers: int  # processes that make pictures; 0 where the rank does it
    threads: float  # that compute on the cores; 0 where a GPU does
    cores: float  # of threads and workers together

    def __call__(self, **changes: Any) -> float:
        """Seconds of an update, with some attributes changed."""
        if changes:
            return replace(self, **changes)()
        making_s, work_s = self.samples * (self.read_s + self.cpu_s), self.samples * self.cpu_s
        if not self.workers:
            return self.compute_s + making_s
        shared_s, threads = work_s / self.cores, min(self.threads, self.cores)
        if threads:  # one that shares its core is late, and all others wait for it
            slowed = min(self.workers, threads)
            shared_s = (self.compute_s + work_s / slowed) / (1 + (self.cores - threads) / slowed)
        return max(self.compute_s, making_s / self.workers, self.samples * self.least_read_s, shared_s)

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
