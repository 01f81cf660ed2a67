"""Compiled programs give the same numbers; only what computes is compiled, and it really is."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

import convoy
from convoy import models
from convoy.engine import program
from convoy.engine import program as stretches
from convoy.engine.gradients import reducer
from ranks import run_ranks

IMAGES = (6, 3, 12, 12)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))
        self.last = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.3), nn.Linear(32, 10))

    def forward(self, x):
        x = self.first(x)
        return self.last((self.second(x) + x).relu())


def _train(net, images):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    mine = convoy.local_samples(net, len(images))
    losses = []
    engine = net._convoy
    for step in range(3):
        optimizer.zero_grad()
        if engine.context.batch_norm == "microbatch":
            engine.samples = (6,) if engine.num_sample_ranks == 1 else (3, 3)
            engine.context.enter(step, 0, (3, 3), images.device)
        loss = net(images[mine]).square().mean()
        loss.backward()
        optimizer.step()
        engine.context.statistics.fold(engine.groups)
        losses.append(loss.item())
    return losses, convoy.state_dict(net)


def _compare(plan, batch_norm, sabotage=None):
    """How many stretches there are, and how often torch has compiled each; asserts that the numbers are the same."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    net, images = Net(), torch.randn(IMAGES)
    twin = copy.deepcopy(net)
    made = []
    inner = torch.compile

    def counting(function, **options):
        made.append(0)
        number = len(made) - 1

        def backend(module, inputs):
            made[number] += 1
            return sabotage(module) if sabotage else module

        return inner(function, backend=backend, **options)

    torch.compile = counting
    try:
        compiled = convoy.parallelize(net, plan, images[:2], batch_norm=batch_norm, seed=1, compile=True)
        losses, state = _train(compiled, images)
    finally:
        torch.compile = inner
    plain = convoy.parallelize(twin, plan, images[:2], batch_norm=batch_norm, seed=1)
    want_losses, want = _train(plain, images)
    assert losses == pytest.approx(want_losses, rel=1e-12)
    for name, tensor in want.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-10, atol=1e-12, msg=name)
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "batch_norm", "num"),
    [
        ("sample=2", "microbatch", 1),
        ("sample=2", "local", 1),
        ("sample=2", "sync", 3),  # around each batch norm
        ("filter=2", "microbatch", None),
        ("height=2", "sync", None),
        ("owt=2", "microbatch", None),
    ],
)
def test_the_numbers_are_the_same(plan, batch_norm, num):
    for made in run_ranks(_compare, 2, plan, batch_norm, timeout=120):
        assert made and all(graphs == 1 for graphs in made)
        assert num is None or len(made) == num


def _slightly_off(module):
    return lambda *inputs: [output * (1 + 1e-9) for output in module(*inputs)]


def _other_gradient(module):
    return lambda *inputs: [output + 1e-6 * (output - output.detach()) for output in module(*inputs)]


def _noticed(plan, batch_norm, sabotage):
    try:
        _compare(plan, batch_norm, sabotage)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("sabotage", [_slightly_off, _other_gradient])
@pytest.mark.parametrize(("plan", "batch_norm"), [("sample=2", "microbatch"), ("height=2", "sync")])
def test_other_numbers_would_be_noticed(plan, batch_norm, sabotage):
    assert all(run_ranks(_noticed, 2, plan, batch_norm, sabotage, timeout=120))


def _uncompiled():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "compiled", lambda instructions, *_: instructions)
        return _compare("sample=2", "microbatch")


def test_a_network_that_is_not_compiled_would_be_noticed():
    assert run_ranks(_uncompiled, 2, timeout=120) == [[], []]


def test_one_device():
    (made,) = run_ranks(_compare, 1, "sample=1", "microbatch", timeout=120)
    assert made == [1]


def _whole():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    images = torch.randn(IMAGES)
    net = convoy.parallelize(Net(), "sample=2", images[:2], seed=1)
    mine = images[convoy.local_samples(net, len(images))]
    want = net(mine).sum()
    graphs = []
    wrapped = torch.compile(net, backend=lambda module, inputs: graphs.append(module) or module)
    torch.testing.assert_close(wrapped(mine).shape, net(mine).shape)
    net.eval()
    torch.testing.assert_close(wrapped(mine), net(mine))
    assert want.isfinite() and not graphs


def test_compiling_around_the_exchanges_leaves_the_network_as_it_is():
    run_ranks(_whole, 2, timeout=120)


def _times_two(x):
    return [x * 2]


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_stretches_end_where_something_else_happens():
    step = stretches.Instruction
    program = [
        step(_times_two, (0,), (1,), alone=False),
        step(_times_two, (1,), (2,), alone=False),
        step(_times_two, (2,), (3,), alone=True),
        step(_times_two, (3,), (4,), alone=False),
    ]
    found = stretches.compiled(program, [4, 1], {})
    assert [(each.inputs, each.outputs, each.alone) for each in found] == [
        ((0,), (1, 2), False),
        ((2,), (3,), True),
        ((3,), (4,), False),
    ]


def test_stretches_end_where_enough_gradients_have_come_together():
    step, large = stretches.Instruction, stretches.LEAST_BYTES
    program = [step(_times_two, (number, 10 + number), (number + 1,), alone=False) for number in range(4)]
    found = stretches.compiled(program, [4], {10: 2 * large, 11: large, 12: large // 2, 13: large // 2})
    assert [sorted(each.inputs) for each in found] == [[0, 10], [1, 11], [2, 12, 13]]


def _events(cut):
    """Messages of gradients and backward passes of compiled stretches, in the order in which they begin."""
    torch.manual_seed(0)
    images = torch.randn(IMAGES)
    events = []
    inner, start = torch.compile, reducer.GradientReducer._start

    def noted(graph, _):
        def run(*values):
            events.append("backward")
            return graph(*values)

        return make_boxed_func(run)

    def sent(self, number):
        events.append("message")
        start(self, number)

    with pytest.MonkeyPatch.context() as patch:
        backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=noted)
        patch.setattr(torch, "compile", lambda function, **options: inner(function, backend=backend, **options))
        patch.setattr(reducer.GradientReducer, "_start", sent)
        patch.setattr(reducer.Sizes, "default", lambda _: reducer.Sizes(alone=1, bucket=1, first=1))
        patch.setattr(program, "LEAST_BYTES", 1 if cut else 2**40)
        net = Net()
        net.last[2] = nn.Identity()  # dropout would divide the network
        net = convoy.parallelize(net, "sample=2", images[:2], batch_norm="local", seed=1, compile=True)
        for _ in range(2):  # the first shows the order of the gradients
            events.clear()
            net(images[convoy.local_samples(net, len(images))]).square().mean().backward()
    return events


@pytest.mark.parametrize("cut", [True, False])
def test_gradients_are_sent_while_the_backward_pass_goes_on(cut):
    for events in run_ranks(_events, 2, cut, timeout=120):
        last = len(events) - 1 - events[::-1].index("backward")
        assert ("message" in events[:last]) == cut, events


def _stretches_of_resnet50():
    made, images = [], torch.randn(2, 3, 32, 32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **_: made.append(function) or function)
        net = convoy.parallelize(models.create("resnet50"), "sample=2", images, batch_norm="local", compile=True)
        net._convoy.samples = (2, 2)
        net._convoy.context.enter(0, 0, (2, 2), torch.device("cpu"))
        net(images)
    return len(made)


def test_a_deep_network_is_a_handful_of_graphs():
    assert run_ranks(_stretches_of_resnet50, 2, timeout=120) == [5, 5]
