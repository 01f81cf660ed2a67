"""An optimizer whose state is divided over the ranks that have the same parameters.

Rajbhandari et al., ZeRO, 2020, stage 1: every rank gets the sum of its own piece of each gradient, updates that piece
of the weights, and the pieces are gathered. These are the bytes of an all-reduce; each rank does 1/k of the update's
work and keeps 1/k of the optimizer's state. Only large parameters are divided (`GradientReducer.scattered`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from convoy.comm.collectives import Pending, gather_ints
from convoy.comm.groups import Groups
from convoy.engine.gradients.buckets import flat, is_dense, laid_out, own_piece, shaped, start_gather
from convoy.engine.gradients.reducer import GradientReducer
from convoy.errors import ConvoyError
from convoy.plans.buckets import WORTH_DIVIDING, Sizes
from convoy.plans.mesh import Axes

# Optimizers that treat every element by itself, so that a piece of a parameter is updated as in the whole.
ELEMENTWISE = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Adagrad,
    optim.Adadelta,
    optim.ASGD,
    optim.Rprop,
)

_WORTH = WORTH_DIVIDING


def sharding_pays(optimizer: Optimizer, parameters: Sequence[tuple[nn.Parameter, Axes]], groups: Groups) -> bool:
    """Whether dividing the state beats an all-reduce and the whole update on every rank; the same on all ranks. The
    bytes sent are the same, so what counts is the update's pass over weights, gradients and state: long on a CPU, and
    short on a GPU, where dividing it is for memory. Parameters come with the axes over which their gradients are added.
    """
    large = [
        parameter.numel() * parameter.element_size()
        for parameter, axes in parameters
        if parameter.requires_grad and parameter.is_cpu and groups.mesh.size(axes) > 1
    ]
    total = sum(size for size in large if size >= Sizes.default(torch.device("cpu")).alone)
    pays = type(optimizer) in ELEMENTWISE and total >= _WORTH
    world = groups.of(groups.mesh.axes)  # ranks with other shards may see other sizes
    return pays if world is None else all(row[0] for row in gather_ints([int(pays)], world))


class ShardedOptimizer(Optimizer):
    """Takes the steps of another optimizer, which is not to be used by itself any more, each rank on its own pieces.
    Its groups hold the parameters themselves: learning rates are set there as ever. `state_dict` is that of the
    undivided optimizer, gathered from all ranks, which must all call it; it loads into either, on any number of ranks.
    The reducer has `scatter`. ConvoyError where the optimizer does not treat every element by itself."""

    def __init__(self, optimizer: Optimizer, reducer: GradientReducer) -> None:
        assert reducer.scatter, "the reducer must leave each rank its piece"
        if type(optimizer) not in ELEMENTWISE:
            names = ", ".join(kind.__name__ for kind in ELEMENTWISE)
            raise ConvoyError(
                f"The state of {type(optimizer).__name__} cannot be divided over ranks, as it may look at whole "
                f"tensors: keep it whole or take one of {names}"
            )
        self._inner = optimizer
        self._reducer = reducer
        scattered = {id(p): i for i, p in enumerate(reducer.parameters) if reducer.scattered(i)}
        super().__init__([dict(group) for group in optimizer.param_groups], optimizer.defaults)
        saved = optimizer.state_dict()
        self._whole: dict[nn.Parameter, tuple[nn.Parameter, int]] = {}  # piece to its parameter, number in the reducer
        for group in optimizer.param_groups:
            group["params"] = [self._piece(p, scattered[id(p)]) if id(p) in scattered else p for p in group["params"]]
        optimizer.state.clear()
        if saved["state"]:
            self.load_state_dict(saved)

    def _piece(self, parameter: nn.Parameter, number: int) -> nn.Parameter:
        assert is_dense(parameter), "a parameter with gaps in memory"
        piece = nn.Parameter(own_piece(flat(parameter.detach()), self._reducer.group(number)))
        self._whole[piece] = (parameter, number)
        return piece

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the weights on all ranks; the sums of the gradients' pieces must be in `.grad`."""
        assert closure is None, "a closure is not supported"
        self._set_options()
        for piece, (parameter, number) in self._whole.items():
            group = self._reducer.group(number)
            piece.data = own_piece(flat(parameter.detach()), group)
            gradient = None if parameter.grad is None else flat(laid_out(parameter.grad, parameter))
            piece.grad = None if gradient is None else own_piece(gradient, group)
        self._inner.step()
        pending = [
            start_gather(flat(parameter.detach()), self._reducer.group(number))
            for piece, (parameter, number) in self._whole.items()
            if piece.grad is not None
        ]
        for work in pending:
            work.wait()
        for piece in self._whole:
            piece.grad = None

    def state_dict(self) -> dict[str, Any]:
        """The whole state, on every rank; all must call it."""
        self._set_options()
        saved = self._inner.state_dict()
        saved["state"] = {index: dict(entries) for index, entries in saved["state"].items()}
        pending: list[Pending] = []
        for index, piece in self._indexed():
            if piece not in self._whole:
                continue
            parameter, number = self._whole[piece]
            for name, value in saved["state"].get(index, {}).items():
                if isinstance(value, Tensor) and value.shape == piece.shape:
                    elements = value.new_empty(parameter.numel())
                    own_piece(elements, self._reducer.group(number)).copy_(value)
                    pending.append(start_gather(elements, self._reducer.group(number)))
                    saved["state"][index][name] = shaped(elements, parameter)
        for work in pending:
            work.wait()
        return saved

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take each rank's pieces of a whole state."""
        divided = {**state_dict, "state": {index: dict(entries) for index, entries in state_dict["state"].items()}}
        for index, piece in self._indexed():
            if piece not in self._whole:
                continue
            parameter, number = self._whole[piece]
            for name, value in divided["state"].get(index, {}).items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    elements = flat(laid_out(value, parameter))
                    divided["state"][index][name] = own_piece(elements, self._reducer.group(number)).clone()
        self._inner.load_state_dict(divided)
        for group, inner_group in zip(self.param_groups, self._inner.param_groups, strict=True):
            group.update({key: value for key, value in inner_group.items() if key != "params"})

    def _indexed(self) -> list[tuple[int, nn.Parameter]]:
        return list(enumerate(p for group in self._inner.param_groups for p in group["params"]))

    def _set_options(self) -> None:
        for group, inner_group in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner_group.update({key: value for key, value in group.items() if key != "params"})
