"""`convoy.recorded` in a loop of one's own."""

import itertools
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convoy
from convoy.errors import ConvoyError
from ranks import run_ranks
from replayed import BrokenGraph, ReplayedGraph, recording

UPDATES = 20
UNLIKE = (1, 3, 9)
"""Updates of a smaller batch: before an update is recorded, while it is, and between its replays."""


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(8 * 36, 4)
    return nn.Sequential(*layers)


def updates(
    plan: str,
    record: type[ReplayedGraph] | None,
    twice: bool = False,
    unlike: tuple[int, ...] = (),
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
    changes: bool = False,
    clip: str = "outside",
) -> list[Tensor]:
    """Losses, weights and buffers of some updates with pictures, masks and learning rates of their own."""
    with recording(record) if record else nullcontext():
        net = convoy.parallelize(network(), plan, example=torch.empty(4, 3, 8, 8), seed=1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

        def gradients(images: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = net(images)
            loss = F.cross_entropy(logits, labels)
            loss.backward()
            if clip == "inside":
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            return {"loss": loss, "right": (logits.argmax(1) == labels).sum()}

        step = convoy.recorded(net, gradients) if record else gradients
        found = []
        for update in range(UPDATES):
            generator = torch.Generator().manual_seed(update)
            number = 7 if update in unlike else 8
            if changes and update in (8, 12):  # and back
                net[1].momentum, net[3].p = (0.5, 0.1) if update == 8 else (0.1, 0.3)
            for _ in range(1 + twice):
                images = torch.randn(number, 3, 8, 8, generator=generator)
                labels = torch.randint(4, (number,), generator=generator)
                mine = convoy.local_samples(net, number)
                with around():
                    found.append(step(images[mine], labels[mine])["loss"].detach())
            if clip == "outside":
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        return [*found, *convoy.state_dict(net).values()]


def compared(plan: str, twice: bool, clip: str = "outside") -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of what is not recorded
        results = (updates(plan, record, twice, clip=clip) for record in (ReplayedGraph, None))
        pairs = zip(*results, strict=True)
        # gradients that were there are added after the exchange, not before it
        return all(torch.equal(a, b) or (twice and torch.allclose(a, b, 1e-4, 1e-5)) for a, b in pairs)


@pytest.mark.parametrize("twice", [False, True], ids=["once", "accumulated"])
@pytest.mark.parametrize("plan", ["serial", "sample=2", "filter=2"])
def test_replayed_passes_have_the_bits_of_passes_that_run(plan: str, twice: bool) -> None:
    assert all(run_ranks(compared, 1 if plan == "serial" else 2, plan, twice))


def test_a_norm_inside_is_that_of_whole_gradients() -> None:
    assert all(run_ranks(compared, 2, "filter=2", False, "inside"))


def compared_unlike(plan: str) -> bool:
    results = (updates(plan, graph, unlike=UNLIKE) for graph in (ReplayedGraph, None))
    return all(map(torch.equal, *results))


@pytest.mark.parametrize("plan", ["serial", "sample=2"])
def test_where_any_rank_has_a_smaller_batch_all_run_as_ever(plan: str) -> None:
    """Of 7 samples the first of two ranks has 4, as of 8."""
    assert all(run_ranks(compared_unlike, 1 if plan == "serial" else 2, plan))


def compared_changed(plan: str) -> bool:
    results = (updates(plan, graph, changes=True) for graph in (ReplayedGraph, None))
    return all(map(torch.equal, *results))


@pytest.mark.parametrize("plan", ["serial", "sample=2"])
def test_what_changes_in_layers_is_not_frozen(plan: str) -> None:
    assert all(run_ranks(compared_changed, 1 if plan == "serial" else 2, plan))


def compared_broken(plan: str) -> tuple[bool, str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        alike = all(map(torch.equal, updates(plan, BrokenGraph), updates(plan, None)))
    return alike, " ".join(str(one.message) for one in caught)


@pytest.mark.parametrize("plan", ["serial", "sample=2", "filter=2"])
def test_a_recording_that_breaks_off_leaves_no_trace(plan: str) -> None:
    for alike, said in run_ranks(compared_broken, 1 if plan == "serial" else 2, plan):
        assert alike and "it breaks off" in said


def test_weights_that_autocast_has_cast_before_are_not_frozen() -> None:
    around = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
    assert all(map(torch.equal, *(updates("serial", graph, around=around) for graph in (ReplayedGraph, None))))


def made(change: Callable[[nn.Module], Callable[..., Tensor]]) -> str:
    with recording(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net = convoy.parallelize(network(), "serial", example=torch.empty(4, 3, 8, 8))
        step = convoy.recorded(net, change(net))
        for _ in range(6):
            step(torch.randn(4, 3, 8, 8), torch.zeros(4, dtype=torch.int64))
    return " ".join(str(one.message) for one in caught)


def test_a_step_of_the_optimizer_is_not_recorded() -> None:
    def change(net: nn.Module) -> Callable[..., Tensor]:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(images: Tensor, labels: Tensor) -> Tensor:
            loss = F.cross_entropy(net(images), labels)
            loss.backward()
            optimizer.step()
            return loss

        return step

    assert "optimizer.step() is part of it" in made(change)


def test_a_parameter_of_another_module_is_named() -> None:
    def change(net: nn.Module) -> Callable[..., Tensor]:
        head = nn.Linear(4, 4)

        def step(images: Tensor, labels: Tensor) -> Tensor:
            loss = F.cross_entropy(head(net(images)), labels)
            loss.backward()
            return loss

        return step

    assert "a parameter is used that is none of the network's" in made(change)


def test_random_numbers_of_torchs_own_are_named() -> None:
    def change(net: nn.Module) -> Callable[..., Tensor]:
        def step(images: Tensor, labels: Tensor) -> Tensor:
            loss = F.cross_entropy(net(images + torch.rand_like(images)), labels)
            loss.backward()
            return loss

        return step

    assert "draws random numbers from torch's generator" in made(change)


def test_more_passes_than_before_are_noticed() -> None:
    def change(net: nn.Module) -> Callable[..., Tensor]:
        calls: list[int] = []

        def step(images: Tensor, labels: Tensor) -> Tensor:
            calls.append(1)
            for _ in range(1 + len(calls) // 3):
                loss = F.cross_entropy(net(images), labels)
                loss.backward()
            return loss

        return step

    assert "two updates after each other" in made(change) or "takes another tensor" in made(change)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((torch.empty(4, 3, 8, 8), 1), "takes tensors alone"),
        (([torch.empty(4, 3, 8, 8)],), "takes tensors alone"),
        ((), "takes tensors alone"),
        ((torch.empty(4, 3, 8, 8, requires_grad=True),), "gives no gradients of its arguments"),
    ],
)
def test_arguments_are_tensors_without_gradients(arguments: tuple, named: str) -> None:
    net = convoy.parallelize(network(), "serial", example=torch.empty(4, 3, 8, 8))
    with pytest.raises(ConvoyError, match=named):
        convoy.recorded(net, lambda *_: None)(*arguments)


def test_what_is_no_function_or_names_arguments_is_refused() -> None:
    net = convoy.parallelize(network(), "serial", example=torch.empty(4, 3, 8, 8))
    for net_and_function in ((lambda x: x, net), (net, torch.zeros(()))):
        with pytest.raises(ConvoyError, match=r"the network, then a function"):
            convoy.recorded(*net_and_function)
    with pytest.raises(ConvoyError, match="by position"):
        convoy.recorded(net, net)(input=torch.empty(4, 3, 8, 8))
    assert convoy.recorded(net, net)(torch.randn(4, 3, 8, 8)).grad_fn is None


def test_in_evaluation_mode_it_runs_as_ever() -> None:
    with recording():
        net = convoy.parallelize(network(), "serial", example=torch.empty(4, 3, 8, 8))
        step = convoy.recorded(net, lambda images: net(images).sum())
        for _ in range(7):
            step(torch.randn(4, 3, 8, 8))
        net.eval()
        images = torch.randn(4, 3, 8, 8)
        assert torch.equal(step(images), net(images).sum())


def test_autocast_that_is_switched_on_later_is_followed() -> None:
    def switched_on() -> Callable[[], AbstractContextManager[object]]:
        number = itertools.count()
        return lambda: torch.autocast("cpu", torch.bfloat16) if next(number) >= 12 else nullcontext()

    pairs = zip(*(updates("serial", record, around=switched_on()) for record in (ReplayedGraph, None)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_batches_of_another_shape_run_as_ever() -> None:
    """Here in fewer passes, with fewer results."""
    found: list[list[tuple[Tensor, ...]]] = []
    for record in (recording, nullcontext):
        with record():
            net = convoy.parallelize(network(), "serial", example=torch.empty(4, 3, 8, 8), seed=1)
            step = convoy.recorded(net, lambda images, net=net: [net(part).sum() for part in images.split(2)])
            torch.manual_seed(0)
            found.append([step(torch.randn(number, 3, 8, 8)) for number in (4, 4, 4, 4, 4, 2, 4, 4)])
    for replayed, plain in zip(*found, strict=True):
        assert len(replayed) == len(plain) and all(map(torch.equal, replayed, plain))


def test_what_is_given_back_of_the_inputs_stays_as_it_was() -> None:
    with recording():
        net = convoy.parallelize(network(), "serial", example=torch.empty(4, 3, 8, 8))
        step = convoy.recorded(net, lambda images: (net(images).sum(), images))
        given = [torch.full((4, 3, 8, 8), float(number)) for number in range(8)]
        found = [step(images)[1] for images in given]
    assert all(map(torch.equal, given, found))
