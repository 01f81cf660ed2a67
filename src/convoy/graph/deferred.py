"""Networks that are built without their numbers, which are made later, tensor by tensor.

Within `deferred()` every new tensor has a shape, a type and a device, and no memory. What is done to it is noted as a
step: the operation, its arguments, and the state of the random numbers before. `evaluate` runs the steps that a tensor
depends on, and no others, so that a network larger than a device's memory can be initialized one tensor at a time, and
of each no more than a part kept. The numbers are bit by bit those of the network built at once.

Tensors of one storage share a `_Memory`, which has the steps that write to it; views need no step of their own. Code
that asks for a number (`.item()`) gets it: what it depends on runs at once. Random numbers are drawn twice: where they
are asked for, into memory that is dropped, as those drawn after them depend on that; and again in `evaluate`.

The one file that uses torch's modes of dispatch for this. The name is torchdistx's, whose `deferred_init` noted
operations in the same way; it forgot the random numbers.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from convoy.errors import ConvoyError
from convoy.graph import tree

T = TypeVar("T")
_META = torch.device("meta")
_FILLS = {"uniform_", "normal_", "bernoulli_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_"}
"""They write random numbers over whatever was there."""
_EVALUATED = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
_numbers = itertools.count()


@dataclass(eq=False)
class _Memory:
    """What tensors of one storage have in common: the steps that wrote to it so far."""

    device: torch.device
    steps: "list[_Step]" = field(default_factory=list)


@dataclass(frozen=True)
class _Place:
    """A tensor as a region of a memory."""

    memory: _Memory
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def begin(self) -> int:
        """Its first byte."""
        return self.offset * self.dtype.itemsize

    @property
    def end(self) -> int:
        """The byte after its last."""
        steps = sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        return (self.offset + steps + 1) * self.dtype.itemsize

    def blank(self) -> Tensor:
        """A tensor that lies so, with any numbers."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.memory.device)

    def of(self, storages: "Mapping[_Memory, torch.UntypedStorage]") -> Tensor:
        """This region of memory that is there."""
        found = torch.empty(0, dtype=self.dtype, device=self.memory.device)
        return found.set_(storages[self.memory], self.offset, self.size, self.stride)


@dataclass(eq=False)
class _Step:
    """An operation that writes numbers.

    Attributes:
        function: what it calls, with places in the arguments in place of deferred tensors.
        made: the new tensors among its results; None for others.
        read: the memories that it takes numbers from, with how many steps each had then.
        drawn: the generator that it draws from, and its state before.
        dtype: the default type of numbers.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    made: list[_Place | None] = field(default_factory=list)
    read: list[tuple[_Memory, int]] = field(default_factory=list)
    drawn: tuple[torch.Generator, Tensor] | None = None
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    number: int = field(default_factory=lambda: next(_numbers))

    def run(self, storages: dict[_Memory, torch.UntypedStorage]) -> None:
        """Do it to memory that is there; what it makes is put beside that."""
        args, kwargs = tree.replace((self.args, self.kwargs), _Place, lambda place: place.of(storages))
        there = {storage._cdata for storage in storages.values()}
        with _default_dtype(self.dtype), _drawing(self.drawn):
            result = self.function(*args, **kwargs)
        for place, tensor in zip(self.made, tree.leaves(result, Tensor), strict=True):
            if place is None:
                continue
            lies = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype)
            storage = tensor.untyped_storage()
            if lies != (place.size, place.stride, place.offset, place.dtype) or storage._cdata in there:
                raise _cannot(self.function)
            storages[place.memory] = storage


class Deferred(Tensor):
    """A tensor without numbers as yet. Operations on it are noted, wherever they are called."""

    _meta: Tensor
    _memory: _Memory
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
    torch's random numbers are left in the state in which that leaves them. All that torch makes is deferred: what numpy
    makes is there at once. Weights may be loaded within the context, or after it.

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

    def blank(self, place: _Place) -> Tensor:
        """As `_Place.blank`, in memory that is used again: between freed blocks small ones stay, and the process
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
    >>> convoy.materialize(model)  # as `build_model()` alone would have made it

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
        kept = {key: value for key, value in vars(module).items() if key != "_modules"}
        found |= {id(tensor): tensor for tensor in tree.leaves(kept, Deferred)}
    last: dict[_Memory, _Place] = {}
    for place in sorted((_place(x) for x in found.values() if x.numel()), key=lambda place: place.begin):
        before = last.get(place.memory)
        if before is not None and place.begin < before.end:
            raise ConvoyError(
                f"two tensors of the network, {list(before.size)} and {list(place.size)}, share memory, which "
                "cannot be deferred: tie weights by giving both layers the same parameter, or build it without it"
            )
        last[place.memory] = place
    return list(found.values())


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
    made = _wrap(meta, _Memory(torch.device("cpu") if like.is_meta else like.device))
    made._memory.steps.append(_Step(read, made=[_place(made)]))
    return made


def held(tensor: Tensor) -> Deferred:
    """A tensor with these numbers, of which a deferred network is to take no copy yet: those of a mapped file.

    Args:
        tensor: is never changed.
    """
    return lazy(_Constant(tensor), tensor)


def evaluate(value: T) -> T:
    """The numbers of a deferred tensor, in memory of its own; all else is given back as it is."""
    if not isinstance(value, Deferred):
        return value
    place = _place(value)
    with _disable_current_modes(), torch.no_grad():
        if not value.numel():
            return cast(T, place.blank())
        found = place.of(_replay(place.memory))
        return cast(T, found if found.nbytes == found.untyped_storage().nbytes() else found.clone())


def fingerprint(tensors: Iterable[Deferred]) -> bytes:
    """16 bytes that are the same on ranks on which the tensors get the same numbers.

    Operations, arguments and random states are compared, and what else numbers depend on: torch's version, the kinds of
    processors and of GPUs.
    """
    places = [_place(tensor) for tensor in tensors]
    known: dict[_Memory, int] = {}

    def text(item: Any) -> str:
        if isinstance(item, Tensor):
            return _digest(item)
        if isinstance(item, torch.Generator):
            return item.device.type
        number = known.setdefault(item.memory, len(known))
        return repr((number, item.memory.device.type, item.dtype, item.size, item.stride, item.offset))

    gpus = {place.memory.device for place in places if place.memory.device.type == "cuda"}
    models = sorted({torch.cuda.get_device_name(device) for device in gpus})
    said = hashlib.blake2b(digest_size=16)
    said.update(repr((torch.__version__, torch.backends.cpu.get_cpu_capability(), models)).encode())
    for step in _steps([(place.memory, len(place.memory.steps)) for place in places]):
        given = tree.replace((step.args, step.kwargs, step.made), (_Place, Tensor, torch.Generator), text)
        drawn = None if step.drawn is None else _digest(step.drawn[1])
        said.update(repr((str(step.function), given, drawn, step.dtype)).encode())
    said.update(repr([text(place) for place in places]).encode())
    return said.digest()


class _Constant:
    """Numbers that are there."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __call__(self) -> Tensor:
        return self._tensor.clone()

    def __str__(self) -> str:
        return _digest(self._tensor)


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
            raise _cannot(func)
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
            raise _cannot(func) from None
        return _at_once(func, args, kwargs)
    if not given and not any(meta.numel() for meta in tree.leaves(result, Tensor)):
        return func(*args, **kwargs)  # what a storage that is there is given to next, as in `torch.load`
    if [_geometry(tensor._meta) for tensor in own] != before:
        if _is_turn(func):
            with torch._C._DisableTorchDispatch():  # the sizes that are seen follow
                func(*args, **kwargs)
            return own[0]
        raise _cannot(func)
    memories = {tensor._meta.untyped_storage()._cdata: tensor._memory for tensor in own}
    same = {id(tensor._meta): tensor for tensor in own}
    default = device or (own[0].device if own else torch.device("cpu"))
    outputs, made = [], []
    for meta in tree.leaves(result, Tensor):
        memory = memories.get(meta.untyped_storage()._cdata)
        output = same[id(meta)] if id(meta) in same else _wrap(meta, memory or _Memory(default))
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
    made: list[_Place | None],
    written: list[Deferred],
    device: torch.device,
    mode: _Building | None,
) -> None:
    own = tree.leaves((args, kwargs), Deferred)
    drawn = None
    if torch.Tag.nondeterministic_seeded in func.tags:
        given = tree.leaves((args, kwargs), torch.Generator)
        generator = given[0] if given else _default_generator(device)
        drawn = generator, generator.get_state()
        fills = func._schema.name.removeprefix("aten::") in _FILLS or "_like" in func._schema.name
        blank = _Place.blank if mode is None else mode.blank
        func(*tree.replace(args, Deferred, lambda x: blank(_place(x)) if fills else evaluate(x)), **kwargs)
    args, kwargs = tree.replace(
        (args, kwargs), Tensor, lambda x: _place(x) if isinstance(x, Deferred) else x.detach().clone()
    )
    read = [(tensor._memory, len(tensor._memory.steps)) for tensor in own]
    step = _Step(func, args, kwargs, made, read, drawn)
    for memory in {tensor._memory for tensor in written} | {place.memory for place in made if place is not None}:
        memory.steps.append(step)


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


def _wrap(meta: Tensor, memory: _Memory) -> Deferred:
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


def _place(tensor: Deferred) -> _Place:
    meta = tensor._meta
    return _Place(tensor._memory, meta.dtype, tuple(meta.shape), meta.stride(), int(meta.storage_offset()))


def _steps(wanted: list[tuple[_Memory, int]]) -> list[_Step]:
    """The steps after which memories are as they were after so many of their steps, in order."""
    found: dict[int, _Step] = {}
    seen: dict[_Memory, int] = {}
    while wanted:
        memory, end = wanted.pop()
        for step in memory.steps[seen.get(memory, 0) : end]:
            if step.number not in found:
                found[step.number] = step
                wanted += step.read
        seen[memory] = max(end, seen.get(memory, 0))
    return [found[number] for number in sorted(found)]


def _replay(memory: _Memory) -> dict[_Memory, torch.UntypedStorage]:
    """A memory with its numbers; what else that takes is freed as soon as nothing needs it."""
    steps = _steps([(memory, len(memory.steps))])
    last = {used: step.number for step in steps for used in _uses(step)} | {memory: -1}
    storages: dict[_Memory, torch.UntypedStorage] = {}
    for step in steps:
        step.run(storages)
        for used in _uses(step):
            if last[used] == step.number:
                storages.pop(used, None)
    return storages


def _uses(step: _Step) -> set[_Memory]:
    return {memory for memory, _ in step.read} | {place.memory for place in step.made if place is not None}


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator


@contextmanager
def _drawing(drawn: tuple[torch.Generator, Tensor] | None) -> Iterator[None]:
    """Within it a generator is as it was; after it as before it."""
    if drawn is None:
        yield
        return
    generator, state = drawn
    kept = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(kept)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    kept = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(kept)


def _digest(tensor: Tensor) -> str:
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    lies = tensor.dtype, tuple(tensor.shape), tensor.stride()
    return f"{lies} {hashlib.blake2b(content, digest_size=16).hexdigest()}"


def _cannot(func: Any) -> ConvoyError:
    return ConvoyError(f"{func} cannot be deferred: build this network without convoy.deferred")
