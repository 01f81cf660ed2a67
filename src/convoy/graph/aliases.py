"""Tensors that share memory: a change of one in place is a change of the others, which a graph cannot say."""

from torch import Tensor

from convoy.graph.errors import CaptureError
from convoy.graph.fake import storage


class Aliases:
    """Every tensor of a capture by the memory it uses; keeps them alive, so that ids and memory stay theirs."""

    def __init__(self) -> None:
        self._sharing: dict[int, dict[int, Tensor]] = {}
        self._protected: dict[int, str] = {}
        self._outdated: dict[int, str] = {}

    def add(self, tensor: Tensor) -> None:
        """A tensor that has the right numbers now."""
        self._sharing.setdefault(storage(tensor), {})[id(tensor)] = tensor
        self._outdated.pop(id(tensor), None)

    def protect(self, tensor: Tensor, name: str) -> None:
        """A parameter or buffer, which nothing may change."""
        self._protected[storage(tensor)] = name
        self.add(tensor)

    def write(self, tensor: Tensor, layer: str) -> None:
        """`tensor` is changed in place: the others that share its memory are not to be used again."""
        for other in self._sharing.get(storage(tensor), {}):
            if other != id(tensor):
                self._outdated[other] = layer

    def check(self, tensor: Tensor, layer: str) -> None:
        """Raise CaptureError where something else has changed this tensor in place."""
        if (changed_by := self._outdated.get(id(tensor))) is not None:
            raise CaptureError(f"it uses a tensor that {changed_by or 'the network'} changed through a view", layer)

    def check_writable(self, tensor: Tensor, function: str, layer: str) -> None:
        """Raise CaptureError where a tensor's memory is that of a parameter or buffer."""
        if (name := self._protected.get(storage(tensor))) is not None:
            raise CaptureError(f"{function} changes {name} in place", layer)
