"""A watched update: every call has its marks, messages go to the calls that ask for them, and no number changes."""

import itertools

import torch
from torch import nn

import convoy
from convoy.engine.gradients.divided import plain
from convoy.engine.network import network_of
from convoy.engine.watched import DeviceClock, WatchedUpdate
from ranks import run_ranks


def seen(plan: str) -> list[tuple[str, str]]:
    """Kinds and calls of the segments, each once, in their order, by a clock that goes on whenever it is looked at; no
    gradient changes."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    net, images = convoy.parallelize(net, plan, example=torch.ones(2, 6), seed=0), torch.arange(24.0).reshape(4, 6) / 24
    mine, ticks, gradients = images[convoy.local_samples(net, 4)], itertools.count(1.0), []
    watch = WatchedUpdate(DeviceClock(torch.device("cpu"), lambda: next(ticks)))
    for number in range(3):
        net.zero_grad()
        if number == 2:
            network_of(net).watch = watch.of_pass
            with watch.parameters(list(net.parameters())):
                net(mine).square().mean().backward()
            watch.mark("rest")
        else:
            net(mine).square().mean().backward()
        gradients.append([plain(p.grad).clone() for p in net.parameters()])
    assert all(map(torch.equal, gradients[1], gradients[2]))
    return list(dict.fromkeys((segment.kind, segment.call) for segment in watch.segments()))


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
