"""Local response normalization: each channel needs its neighbours (Krizhevsky et al., 2012, section 3.3)."""

from collections.abc import Sequence

from convoy.plans.layout import Indices, Layout, Split
from convoy.plans.rules.following import resolved
from convoy.plans.rules.rule import Placed, Situation


def rule(situation: Situation) -> Placed:
    """Where ranks hold consecutive channels, each asks for a few more on both sides; otherwise for all channels."""
    call = situation.call
    source = call.attributes["input"]
    layout = resolved(situation, source)
    channels = layout.split(1)
    if channels is None:
        return Placed({source: layout}, {call.outputs[0]: layout})
    rest = {dim: split for dim, split in layout.splits if dim != 1}
    if not all(isinstance(part, range) for part in channels.parts):
        whole = Layout.of(rest)
        return Placed({source: whole}, {call.outputs[0]: whole})
    size, total = call.attributes["size"], situation.shape(source)[1]
    wider = Layout.of({**rest, 1: Split(channels.axes, halo(channels.parts, size, total))})
    return Placed({source: wider}, {call.outputs[0]: layout})


def halo(parts: Sequence[Indices], size: int, total: int) -> tuple[range, ...]:
    """The channels that a window of `size` around each of a rank's channels covers."""
    found = []
    for part in parts:
        first, last = (max(0, part[0] - size // 2), min(total, part[-1] + 1 + (size - 1) // 2)) if part else (0, 0)
        found.append(range(first, last))
    return tuple(found)
