"""Networks that are built without their numbers, which are made later, tensor by tensor.

Within `deferred()` every new tensor has a shape, a type and a device, and no memory. What is done to it is noted as a
step (`steps`): the operation, its arguments, and the state of the random numbers before. `evaluate` runs the steps that
a tensor depends on, and no others, so that a network larger than a device's memory can be initialized one tensor at a
time, and of each no more than a part kept. The numbers are bit by bit those of the network built at once.

Tensors of one storage share a `Memory`, which has the steps that write to it; views need no step of their own. Code
that asks for a number (`.item()`) gets it: what it depends on runs at once. Random numbers are drawn twice: where they
are asked for, into memory that is dropped, as those drawn after them depend on that; and again in `evaluate`.

The idea and the name are those of torchdistx's `deferred_init`, which notes what happens within its call alone. This is
the one file that uses torch's private modules for it.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from convoy.errors import ConvoyError
from convoy.graph import tree
from convoy.graph.steps import Constant, Memory, Place, Step, cannot, default_generator, digest, replay, steps_behind

T = TypeVar("T")
_META = torch.device("meta")
_FILLS = {"uniform_", "normal_", "bernoulli_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_"}
"""They write random numbers over whatever was there."""
_PIECE = 2**22
"""Numbers that `uniform_` and `normal_` are made to draw at once: a multiple of the 16 that a CPU draws together."""
_EVALUATED = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


class Deferred(Tensor):
    """A tensor without numbers as yet. Operations on it are noted, wherever they are called."""

    _meta: Tensor
    _memory: Memory
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _dispatch(func, args, kwargs or {}, None)

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, other: Tensor) -> None:
        found = other if isinstance(other, Deferred) else held(other.detach().clone())
        Tensor.data.__set__(self, found)  # type: ignore[attr-defined]
        self._meta, self._memory = found._meta, found._memory

    def __deepcopy__(self, memo: dict[int, Any]) -> "Deferred":
        if id(self) not in memo:
            with torch.no_grad():
                copied = self.detach().clone()
            copied.__dict__ |= {key: value for key, value in vars(self).items() if key not in ("_meta", "_memory")}
            memo[id(self)] = copied.requires_grad_(self.requires_grad)
        found: Deferred = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConvoyError("a deferred network has no numbers to save: convoy.materialize(model) makes them")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"deferred(size={list(self.shape)}, dtype={self.dtype}, device={str(self.device)!r})"

    def tolist(self) -> Any:
        return evaluate(self).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The numbers, not to be changed: nobody would note it."""
        array = evaluate(self).numpy(force=force)
        array.flags.writeable = False
        return array


@contextmanager
def deferred() -> Iterator[None]:
    """A context in which a network is built without its numbers, which `convoy.parallelize` makes: on every rank those
    of its own part, one tensor at a time.

    For networks that no device could hold as a whole. The weights are those of the network built at once, bit by bit;
    torch's random numbers are left in the state in which that leaves them. All that torch makes is deferred; what numpy
    makes, or a file holds, is in memory at once. Changes after the context count as well.

    >>> with convoy.deferred():
    ...     model = build_model()
    >>> net = convoy.parallelize(model, "filter=2", example=images)

    Raises:
        ConvoyError: an operation cannot be deferred; it is named.
    """
    with _Building():
        yield


class _Building(TorchDispatchMode):
    """Makes new tensors deferred ones."""

    def __init__(self) -> None:
        super().__init__()
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def blank(self, place: Place) -> Tensor:
        """As `Place.blank`, in memory that is used again: between freed blocks small ones stay, and the process
        grows."""
        size = place.end - place.begin
        if self._scratch.device != place.memory.device or self._scratch.nbytes < size:
            self._scratch = torch.empty(0, dtype=torch.uint8)  # first, so that there are not two
            self._scratch = torch.empty(size, dtype=torch.uint8, device=place.memory.device)
        return self._scratch[:size].view(place.dtype).as_strided(place.size, place.stride)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it would import it, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {}, self)


def materialize(model: nn.Module, all_but: Iterable[Tensor] = ()) -> nn.Module:
    """Make the numbers of a network that was built within `convoy.deferred()`, in place. Others are left as they are.

    `convoy.parallelize` takes such networks as they are, and makes no more of them than this rank's part.

    >>> with convoy.deferred():
    ...     model = build_model()
    >>> model = convoy.materialize(model)  # as `build_model()` alone would have made it

    Args:
        model: any network.
        all_but: tensors that are left as they are.
    """
    left = {id(tensor) for tensor in all_but}
    for tensor in deferred_tensors(model):
        if id(tensor) not in left:
            fill(tensor, evaluate(tensor))
    return model


def deferred_tensors(model: nn.Module) -> list[Deferred]:
    """The tensors of a network that have no numbers, each once: parameters, buffers, and what else its layers hold.

    Raises:
        ConvoyError: one of them shares memory with another, which would be two of them from then on.
    """
    found: dict[int, Deferred] = {}
    for module in model.modules():
        found |= {id(tensor): tensor for tensor in _held_by(vars(module), _DEPTH)}
    last: dict[Memory, Place] = {}
    for place in sorted((_place(x) for x in found.values() if x.numel()), key=lambda place: place.begin):
        before = last.get(place.memory)
        if before is not None and place.begin < before.end:
            raise ConvoyError(
                f"two tensors of the network, {list(before.size)} and {list(place.size)}, share memory, which "
                "cannot be deferred: tie weights by giving both layers the same parameter, or build it without it"
            )
        last[place.memory] = place
    return list(found.values())


_DEPTH = 4


def _held_by(value: Any, depth: int) -> Iterator[Deferred]:
    """The deferred tensors in lists, dicts and the like, which may be in circles."""
    if isinstance(value, Deferred):
        yield value
    elif depth and isinstance(value, dict | list | tuple | set):
        for item in list(value.values()) if isinstance(value, dict) else list(value):
            yield from _held_by(item, depth - 1)


def fill(tensor: Deferred, numbers: Tensor) -> None:
    """Make a tensor, wherever it is held, one with these numbers, which may be another part of it than the whole."""
    if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
        raise ConvoyError("a deferred parameter has hooks: register them after convoy.parallelize")
    made = numbers.detach()
    made = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
    kept = {key: value for key, value in vars(tensor).items() if key not in ("_meta", "_memory", "_is_param")}
    torch.utils.swap_tensors(tensor, made)
    vars(tensor).update(kept)


def lazy(read: Callable[[], Tensor], like: Tensor) -> Deferred:
    """A tensor whose numbers come from a function, which is called each time that they are needed.

    Args:
        read: gives a tensor that is nobody else's; its `str` says which numbers these are.
        like: has its shape, strides and type; its device is the CPU if this is on the meta device.
    """
    meta = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=_META)
    made = _wrap(meta, Memory(torch.device("cpu") if like.is_meta else like.device))
    made._memory.steps.append(Step(read, made=[_place(made)]))
    return made


def held(tensor: Tensor) -> Deferred:
    """A tensor with these numbers, of which a deferred network is to take no copy yet: those of a mapped file.

    Args:
        tensor: is never changed.
    """
    return lazy(Constant(tensor), tensor)


def evaluate(value: T) -> T:
    """The numbers of a deferred tensor, in memory of its own; all else is given back as it is."""
    if not isinstance(value, Deferred):
        return value
    place = _place(value)
    with _disable_current_modes(), torch.no_grad():
        if not value.numel():
            return cast(T, place.blank())
        found = place.of(replay(place.memory))
        return cast(T, found if found.nbytes == found.untyped_storage().nbytes() else found.clone())


def fingerprint(tensors: Iterable[Deferred]) -> bytes:
    """16 bytes that are the same on ranks on which the tensors get the same numbers.

    Operations, arguments and random states are compared, and what else numbers depend on: torch's version, the kinds of
    processors and of GPUs.
    """
    places = [_place(tensor) for tensor in tensors]
    known: dict[Memory, int] = {}

    def text(item: Any) -> str:
        if isinstance(item, Tensor):
            return digest(item)
        if isinstance(item, torch.Generator):
            return item.device.type
        number = known.setdefault(item.memory, len(known))
        return repr((number, item.memory.device.type, item.dtype, item.size, item.stride, item.offset))

    gpus = {place.memory.device for place in places if place.memory.device.type == "cuda"}
    models = sorted({torch.cuda.get_device_name(device) for device in gpus})
    said = hashlib.blake2b(digest_size=16)
    said.update(repr((torch.__version__, torch.backends.cpu.get_cpu_capability(), models)).encode())
    for step in steps_behind([(place.memory, len(place.memory.steps)) for place in places]):
        given = tree.replace((step.args, step.kwargs, step.made), (Place, Tensor, torch.Generator), text)
        drawn = None if step.drawn is None else digest(step.drawn[1])
        said.update(repr((str(step.function), given, drawn, step.dtype)).encode())
    said.update(repr([text(place) for place in places]).encode())
    return said.digest()


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: _Building | None) -> Any:
    """Call an operation on deferred tensors, or one that makes a new tensor."""
    given = tree.leaves((args, kwargs), Tensor)
    own = [tensor for tensor in given if isinstance(tensor, Deferred)]
    device = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
    if given and not own:
        return func(*args, **kwargs)
    if device == _META:
        return _on_meta(func, args, kwargs)
    written = _written(func, args, kwargs)
    written_own = [tensor for tensor in written if isinstance(tensor, Deferred)]
    if len(written) > len(written_own) or _asks_for_numbers(func, written):
        if written_own or func._schema.name == "aten::set_":
            raise cannot(func)
        return _at_once(func, args, kwargs)
    if mode is None and not written and any(x.is_floating_point() for x in given if not isinstance(x, Deferred)):
        raise ConvoyError(
            "the network was built within convoy.deferred() and has no numbers yet: call convoy.parallelize, or "
            "convoy.materialize(model), before it is used"
        )
    before = [_geometry(tensor._meta) for tensor in own]
    try:
        result = _on_meta(func, args, kwargs)
    except NotImplementedError:
        if written:
            raise cannot(func) from None
        return _at_once(func, args, kwargs)
    if not given and not any(meta.numel() for meta in tree.leaves(result, Tensor)):
        return func(*args, **kwargs)  # what a storage that is there is given to next, as in `torch.load`
    if [_geometry(tensor._meta) for tensor in own] != before:
        if _is_turn(func):
            with torch._C._DisableTorchDispatch():  # the sizes that are seen follow
                func(*args, **kwargs)
            return own[0]
        raise cannot(func)
    memories = {tensor._meta.untyped_storage()._cdata: tensor._memory for tensor in own}
    same = {id(tensor._meta): tensor for tensor in own}
    default = device or (own[0].device if own else torch.device("cpu"))
    outputs, made = [], []
    for meta in tree.leaves(result, Tensor):
        memory = memories.get(meta.untyped_storage()._cdata)
        output = same[id(meta)] if id(meta) in same else _wrap(meta, memory or Memory(default))
        memories[meta.untyped_storage()._cdata] = output._memory
        outputs.append(output)
        made.append(_place(output) if memory is None else None)
    if written or any(made):
        _note(func, args, kwargs, made, written_own, default, mode)
    rest = iter(outputs)
    return tree.replace(result, Tensor, lambda _: next(rest))


def _note(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    made: list[Place | None],
    written: list[Deferred],
    device: torch.device,
    mode: _Building | None,
) -> None:
    own = tree.leaves((args, kwargs), Deferred)
    drawn = None
    if torch.Tag.nondeterministic_seeded in func.tags:
        given = tree.leaves((args, kwargs), torch.Generator)
        generator = given[0] if given else default_generator(device)
        drawn = generator, generator.get_state()
        name = func._schema.name.removeprefix("aten::")
        fills = name in _FILLS or "_like" in name
        blank = Place.blank if mode is None else mode.blank
        if name in ("uniform_", "normal_") and args[0]._meta.is_contiguous() and device.type == "cpu":
            for piece in _pieces(_place(args[0])):
                func(blank(piece), *args[1:], **kwargs)
        else:
            func(*tree.replace(args, Deferred, lambda x: blank(_place(x)) if fills else evaluate(x)), **kwargs)
    args, kwargs = tree.replace(
        (args, kwargs), Tensor, lambda x: _place(x) if isinstance(x, Deferred) else x.detach().clone()
    )
    read = [(tensor._memory, len(tensor._memory.steps)) for tensor in own]
    step = Step(func, args, kwargs, made, read, drawn)
    for memory in {tensor._memory for tensor in written} | {place.memory for place in made if place is not None}:
        memory.steps.append(step)


def _pieces(place: Place) -> Iterator[Place]:
    """Parts of a contiguous region whose numbers, drawn one after the other, leave the state that the whole leaves."""
    left = math.prod(place.size)
    while left >= 2 * _PIECE:  # so that the last piece is no shorter than those that a CPU draws together
        yield replace(place, size=(_PIECE,), stride=(1,), offset=0)
        left -= _PIECE
    yield replace(place, size=(left,), stride=(1,), offset=0)


def _on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The results without numbers."""
    kwargs = {key: value for key, value in kwargs.items() if key not in ("generator", "pin_memory")}
    args, kwargs = tree.replace((args, kwargs), Tensor, lambda x: x._meta if isinstance(x, Deferred) else x.to(_META))
    names = {argument.name for argument in func._schema.arguments}
    takes_device = "device" in names and (kwargs.get("device") is not None or not tree.leaves(args, Tensor))
    return func(*args, **(kwargs | {"device": _META} if takes_device else kwargs))


def _at_once(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*tree.replace(args, Tensor, evaluate), **tree.replace(kwargs, Tensor, evaluate))


def _asks_for_numbers(func: Any, written: list[Tensor]) -> bool:
    """Whether its result is no tensor, or one whose size depends on numbers."""
    results = [str(each.type) for each in func._schema.returns]
    return (
        bool(_EVALUATED.intersection(func.tags))
        or any("Tensor" not in result for result in results)
        or not (results or written)
    )


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operation writes to."""
    arguments = func._schema.arguments
    given = {**dict(zip((argument.name for argument in arguments), args, strict=False)), **kwargs}
    names = [
        argument.name for argument in arguments if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return tree.leaves([given.get(name) for name in names], Tensor)


def _is_turn(func: Any) -> bool:
    """Whether it turns a tensor round in place, which writes no numbers."""
    return torch.Tag.inplace_view in func.tags and not func._schema.name.startswith(("aten::set_", "aten::resize"))


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.untyped_storage()._cdata, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


def _wrap(meta: Tensor, memory: Memory) -> Deferred:
    if meta.is_conj() or meta.is_neg() or meta.layout != torch.strided:
        raise ConvoyError("complex conjugates, and tensors that are not strided, cannot be deferred: build without it")
    made: Deferred = Tensor._make_wrapper_subclass(
        Deferred,
        meta.shape,
        strides=meta.stride(),
        storage_offset=meta.storage_offset(),
        dtype=meta.dtype,
        device=memory.device,
    )
    made._meta, made._memory = meta, memory
    return made


def _place(tensor: Deferred) -> Place:
    meta = tensor._meta
    return Place(tensor._memory, meta.dtype, tuple(meta.shape), meta.stride(), int(meta.storage_offset()))
