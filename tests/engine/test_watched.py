"""A watched update: every call has its marks, messages go to the calls that ask for them, and no number changes."""

from collections.abc import Callable

import torch
from torch import nn

from convoy.engine.gradients.divided import plain
from convoy.engine.network import network_of
from convoy.engine.parallelize import parallelize
from convoy.engine.watched import DeviceClock, Segment, WatchedUpdate
from ranks import run_ranks

CPU = torch.device("cpu")


def ticking(step: float = 1.0) -> Callable[[], float]:
    """A clock that goes on by a second whenever it is looked at."""
    now = [0.0]

    def look() -> float:
        now[0] += step
        return now[0]

    return look


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def update(plan: str, watched: bool) -> tuple[dict[str, torch.Tensor], list[Segment]]:
    """Gradients, and what was seen, of a pass forward and backward."""
    net = parallelize(network(), plan, example=torch.ones(2, 6), seed=0)
    engine = network_of(net)
    images = torch.arange(24.0).reshape(4, 6) / 24
    mine = images if engine.num_sample_ranks == 1 else images[2 * engine.sample_rank :][:2]
    watch = WatchedUpdate(DeviceClock(CPU, ticking()))
    for number in range(2):
        net.zero_grad()
        if watched and number == 1:
            engine.watch = watch.of_pass
            with watch.parameters(list(net.parameters())):
                net(mine).square().mean().backward()
            watch.mark("rest")
        else:
            net(mine).square().mean().backward()
    found = {name: plain(p.grad).clone() for name, p in net.named_parameters() if p.grad is not None}
    return found, watch.segments()


def seen(plan: str) -> list[tuple[str, str]]:
    """Kinds and calls of the segments, each once, in their order; no number changes."""
    plain_gradients, _ = update(plan, False)
    gradients, segments = update(plan, True)
    assert all(torch.equal(plain_gradients[name], gradients[name]) for name in plain_gradients)
    return list(dict.fromkeys((segment.kind, segment.call) for segment in segments))


def test_calls_are_seen_in_their_order_and_messages_belong_to_the_call_that_asks_for_them() -> None:
    for plan in ("sample=2", "channel=2", "filter=2"):
        for names in run_ranks(seen, 2, plan):
            forward, backward, copies, transfers = (
                [call for kind, call in names if kind == of] for of in ("forward", "backward", "copy", "transfer")
            )
            assert len(forward) == 3 and set(transfers) <= {*forward, ""}
            if plan == "sample=2":
                assert backward == forward[::-1] and ("gradient", "") in names
                assert set(copies) == {forward[0], forward[2]} and not transfers
            else:
                assert transfers
                assert plan == "channel=2" or forward[2] in transfers  # its input is gathered
