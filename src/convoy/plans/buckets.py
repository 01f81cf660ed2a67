"""Which gradients travel together, and in which order.

Small gradients are copied into one flat message, which costs two copies and saves a collective each. Large ones travel
from where autograd has put them, by themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from convoy.plans.mesh import Axes


@dataclass(frozen=True)
class Sizes:
    """When messages are sent, in bytes."""

    alone: int  # a gradient of at least this size travels by itself
    bucket: int  # smaller ones are collected until they have this size
    first: int  # the first message of a pass is sent at this size, so that the exchange begins soon

    @staticmethod
    def default(device: torch.device) -> "Sizes":
        """The sizes that were fastest for the ring of gloo processes; on a GPU copies are cheap and launches dear."""
        if device.type == "cpu":
            return Sizes(alone=2**18, bucket=2**20, first=2**18)
        return Sizes(alone=2**23, bucket=25 * 2**20, first=2**20)


@dataclass(frozen=True)
class Item:
    """A gradient to be sent: over which axes, of which kind, and how many elements it has on the rank with most."""

    axes: Axes
    dtype: torch.dtype
    device: torch.device
    numel: int

    @property
    def kind(self) -> tuple[Axes, torch.dtype, str]:
        """Equal for gradients that can share a message."""
        return self.axes, self.dtype, self.device.type

    @property
    def bytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Bucket:
    """One message."""

    axes: Axes  # over which it is added
    members: tuple[int, ...]  # positions of the gradients in it
    alone: bool  # whether it is the gradient itself, not a copy
    # gradients whose number of users is counted in this message: those of all messages of its kind in the last of them
    tally: tuple[int, ...] = ()


def plan_buckets(items: Sequence[Item], order: Sequence[int], sizes: Sizes) -> list[Bucket]:
    """Cut gradients that become ready in `order` into messages, listed in the order in which they are complete."""
    buckets: list[Bucket] = []
    unfinished: dict[tuple, list[int]] = {}
    for position in order:
        item = items[position]
        if item.bytes >= sizes.alone:
            buckets.append(Bucket(item.axes, (position,), alone=True))
            continue
        members = unfinished.setdefault(item.kind, [])
        members.append(position)
        limit = sizes.bucket if buckets else sizes.first
        if sum(items[member].bytes for member in members) >= limit:
            buckets.append(Bucket(item.axes, tuple(members), alone=False))
            del unfinished[item.kind]
    place = {position: i for i, position in enumerate(order)}
    buckets += [Bucket(items[members[0]].axes, tuple(members), alone=False) for members in unfinished.values()]
    return _with_tallies(sorted(buckets, key=lambda bucket: place[bucket.members[-1]]), items)


def _with_tallies(buckets: list[Bucket], items: Sequence[Item]) -> list[Bucket]:
    """Count users in the last copied message of each kind, in a message of its own where there is none at the end."""
    kinds: dict[tuple, list[int]] = {}
    for number, bucket in enumerate(buckets):
        kinds.setdefault(items[bucket.members[0]].kind, []).append(number)
    tallied = list(buckets)
    for numbers in kinds.values():
        last = buckets[numbers[-1]]
        members = tuple(member for number in numbers for member in buckets[number].members)
        if last.alone:
            tallied.append(Bucket(last.axes, (), alone=False, tally=members))
        else:
            tallied[numbers[-1]] = Bucket(last.axes, last.members, alone=False, tally=members)
    return tallied
