"""Forward and backward passes of a loop of one's own, recorded as a CUDA graph and replayed."""

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from convoy.comm.collectives import by_way_of_host
from convoy.comm.ranks import Ranks
from convoy.engine.network import Network, network_of
from convoy.engine.recorded import Recorded, graph_on
from convoy.engine.stages import StagedNetwork
from convoy.errors import ConvoyError
from convoy.graph.tree import leaves, replace

Result = TypeVar("Result")


def recorded(net: nn.Module, function: Callable[..., Result]) -> Callable[..., Result]:
    """The same function, which a GPU replays as one CUDA graph as soon as that has proved to give the same.

    The host then issues a pass in one call, where hundreds of kernels are worth more time than the GPU needs for small
    batches. The function does forward and backward passes, and leaves the gradients in `net`'s parameters; clipping and
    `optimizer.step()` stay outside, so that learning rates are not frozen:

    >>> def gradients(images, labels):
    ...     loss = F.cross_entropy(net(images), labels)
    ...     loss.backward()
    ...     return loss
    >>> gradients = convoy.recorded(net, gradients)
    >>> loss = gradients(images[mine], labels[mine])
    >>> optimizer.step()
    >>> optimizer.zero_grad()

    The first calls run as ever. Two are compared operation by operation, the next one is recorded, replayed, and
    compared with the pass that ran; ranks agree. Where something cannot be replayed (a number that is read back, as by
    `loss.item()`, one of Python's that changes, a copy from the host), a warning names it and the function runs as
    ever. So do batches of another shape than the first, and all that come while layers are in another mode, or others
    are frozen, than when it was recorded. What it returns has no graph, and is not overwritten by later calls. On a CPU
    nothing is recorded, nor compared.

    Args:
        net: what `convoy.parallelize` returned, without stages.
        function: of tensors on the network's device; gives tensors, or tuples, lists and dicts of them. Whatever else
            it uses must stay as it is.

    Raises:
        ConvoyError: the network is in stages, or this is no function; when it is called, an argument is no tensor, or
            is named.
    """
    if not isinstance(net, nn.Module) or not callable(function):
        raise ConvoyError("convoy.recorded takes the network, then a function: convoy.recorded(net, passes)")
    network = network_of(net)
    if isinstance(network, StagedNetwork):
        raise ConvoyError(
            "convoy.recorded: a network in stages is not recorded, as its ranks send to each other: call the function "
            "itself, or choose a plan without stages"
        )
    return _Step(net, network, function)


class _Step:
    """The function that stands in for the one that is recorded."""

    def __init__(self, net: nn.Module, network: Network, function: Callable[..., Any]) -> None:
        self._network, self._function = network, function
        # What came of the function, and how many passes it made: in this call, and in the one that is recorded.
        self._ran: tuple[Any, int] | None = None
        self._of_recording: tuple[Any, int] | None = None
        self._recorded: Recorded | None = None
        self._stream: torch.cuda.Stream | None = None
        groups = network.groups
        world = groups.world
        graph = graph_on(network.device)
        if graph is None:
            return
        if by_way_of_host(network.device, world):
            _warn("gloo carries what the devices exchange, by way of the CPU")
            return

        ranks, abandon = Ranks(group=world), network.abandon
        self._recorded = Recorded(
            self._run, net, network.context, graph, agree=ranks.first_of, fit=ranks.agree, abandon=abandon, tell=_tell
        )
        if network.device.type == "cuda" and torch.cuda.current_stream() == torch.cuda.default_stream():
            self._stream = torch.cuda.Stream()

    def __call__(self, *args: Any, **named: Any) -> Any:
        if not args or named or not all(isinstance(x, Tensor) for x in args):
            raise ConvoyError(
                "a function that is recorded takes tensors alone, by position: give it everything else another way"
            )
        if any(x.requires_grad for x in args):
            raise ConvoyError(
                "a function that is recorded gives no gradients of its arguments: detach() them, or compute them in it"
            )
        if self._recorded is None:
            return _without_graph(self._function(*args))
        network, passes_before = self._network, self._network.passes
        self._ran = None
        with self._on_stream():
            outputs = iter(self._recorded(passes_before, args))
        ran = self._ran or self._of_recording  # batches of another shape may give something else
        assert ran is not None
        result, passes = ran
        network.passes = passes_before + passes  # a replay announces none, and a recording those of another call
        return replace(result, Tensor, lambda _: next(outputs))

    def _run(self, step: int, inputs: Sequence[Tensor]) -> list[Tensor]:
        self._network.passes = step
        result = _without_graph(self._function(*inputs))
        self._ran = result, self._network.passes - step
        if self._recorded is not None and not self._recorded.is_recorded:
            self._of_recording = self._ran
        return leaves(result, Tensor)

    @contextlib.contextmanager
    def _on_stream(self) -> Any:
        if self._stream is None:
            yield
            return
        outside = torch.cuda.current_stream()
        self._stream.wait_stream(outside)
        with torch.cuda.stream(self._stream):
            if self._network.reducer is not None and self._of_recording is None:
                self._network.reducer = self._network.reducer.anew()  # its accumulators, on this stream
            yield
        outside.wait_stream(self._stream)


def _without_graph(result: Any) -> Any:
    return replace(result, Tensor, lambda x: x.detach())


def _tell(sentence: str) -> None:
    _, refused, reason = sentence.partition("are not recorded as CUDA graphs: ")
    if refused:
        _warn(reason)


def _warn(reason: str) -> None:
    warnings.warn(f"convoy.recorded: the function runs as ever, as {reason}", stacklevel=4)
