"""What a device and its links cost, in one place: all that a step is predicted from."""

from dataclasses import dataclass, field

import torch

from convoy.planner.cost.gradients import Update
from convoy.planner.cost.link import Links
from convoy.planner.cost.local import BatchNorm
from convoy.planner.cost.times import LayerTimes, Times
from convoy.plans.buckets import Sizes


@dataclass(frozen=True)
class HostCost:
    """Something that is done for a pass outside of the network, on each rank for its own samples.

    Attributes:
        per_pass: seconds once.
        per_sample: seconds for each sample.
        beside: whether others do it while the rank computes, so that an update waits only for what is left of it.
        host: seconds once that the host takes to issue it; 0 where it is the device.
    """

    per_pass: float = 0.0
    per_sample: float = 0.0
    beside: bool = False
    host: float = 0.0

    def seconds(self, samples: float) -> float:
        """For a pass over so many samples."""
        return self.per_pass + self.per_sample * samples


@dataclass(frozen=True)
class Costs:
    """Times on one kind of device, all in seconds and bytes.

    Attributes:
        times: seconds of single operations.
        links: between the ranks.
        update: the optimizer's time and memory.
        input: the work before the network: getting a batch, taking it to the device, normalizing it.
        loss: the loss, forward and backward.
        batch_norm: over which samples batch norm takes its statistics.
        microbatch: samples of each microbatch, where that matters to batch norm; 0 for one in each pass.
        on_cpu: whether the ranks compute on CPUs.
        lays_out: whether stages that postpone weight gradients lay out weights once for all passes; see
            `convoy.ops.onednn`.
        sizes: sizes of the messages with gradients; by default the engine's for the device.
        per_transfer: what the engine takes for each step of a redistribution, beside copying and sending.
        slowdowns: how many times as long as in `times` each rank computes, where they are not equally fast; else empty.
        per_parameter: seconds that it takes in an update for each parameter whose gradient is added over ranks.
        host_per_parameter: the same of the host, where that is not the device.
        recorded: whether passes without stages are replayed as CUDA graphs, for which a host does nothing.
    """

    times: LayerTimes
    links: Links = field(default_factory=Links)
    update: Update = field(default_factory=Update)
    input: HostCost = field(default_factory=HostCost)
    loss: HostCost = field(default_factory=HostCost)
    batch_norm: BatchNorm = "sync"
    microbatch: int = 0
    on_cpu: bool = True
    lays_out: bool = False
    sizes: Sizes | None = None
    per_transfer: Times = field(default_factory=Times)
    per_parameter: float = 0.0
    slowdowns: tuple[float, ...] = ()
    host_per_parameter: float = 0.0
    recorded: bool = False

    @property
    def message_sizes(self) -> Sizes:
        """Sizes of the messages with gradients."""
        return self.sizes or Sizes.default(torch.device("cpu" if self.on_cpu else "cuda"))
