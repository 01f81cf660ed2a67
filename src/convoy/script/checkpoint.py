"""Checkpoints of a training loop of one's own: saved under one plan, loaded under any, on any number of devices. Nested
values become JSON and tensors, and come back exactly as they were; nothing is pickled.
"""

import copy
import glob
import hashlib
import json
import math
import uuid
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from convoy.checkpoint.files import RECORD, STATE, TYPES, Checkpoint, values_explained
from convoy.checkpoint.store import Draft, read_checkpoint, snapshot, sweep
from convoy.comm.ranks import broadcast_object, broadcast_tensors, gather_objects, received
from convoy.engine.agreement import agree
from convoy.engine.allocation import without_holes
from convoy.engine.network import Network, network_of
from convoy.errors import ConvoyError
from convoy.files import stamp, writing
from convoy.graph.tree import replace
from convoy.script.ranks import check_same_on_all_ranks, fail_on_all_ranks
from convoy.script.state import NamedOptimizer, Parts, Whole

_OWN = ("net", "optimizer", "scheduler")
_IDENTITY = "convoy.save"
_AS_BEFORE = "free what is in its way; what was there before is as it was"


def save(
    path: str | Path, net: nn.Module, optimizer: Optimizer | None = None, *, scheduler: Any = None, **anything: Any
) -> None:
    """Save the state of a training loop, whole and by the names of the plain network. All ranks call it.

    >>> convoy.save("last", net, optimizer, scheduler=scheduler, epoch=3)
    >>> rest = convoy.load("last", net, optimizer, scheduler=scheduler)  # under any plan, on any number of devices
    >>> rest["epoch"]
    3

    The checkpoint is a folder: tensors as safetensors, of which every rank that sees the folder writes its share, all
    else as JSON, and the SHA-256 of every file. It is written under another name, synced and renamed: whole or not
    there, and until it is whole one of before stays in its place.

    With the network goes what its dropout masks depend on, the seed and the number of training passes, so that a loop
    that goes on draws what the uninterrupted one would have. Random numbers that the script itself draws (augmentation,
    shuffling) are its own: draw them by epoch and sample, or save a generator's state: `draws=generator.get_state()`.

    Args:
        path: the folder to write; an earlier checkpoint of `convoy.save` there is replaced.
        net: what `convoy.parallelize` returned.
        optimizer: optimizer of its parameters, or of some of them.
        scheduler: learning-rate schedule, or any object with `state_dict` and `load_state_dict`.
        anything: more to save, under names of your own: numbers, strings, None, lists, tuples and dictionaries (those
            of rank 0 count), tensors, also in such, and objects with `state_dict` and `load_state_dict` (the same on
            all ranks); other networks, and copies of this one (`copy.deepcopy(net)`, `AveragedModel(net)`), which are
            saved whole; and their optimizers.

    Raises:
        ConvoyError: something cannot be saved, or not to that path; what was there before is as it was.
    """
    network = network_of(net)
    agree("convoy.save", network.groups)
    with fail_on_all_ranks(network):
        objects, values = _given(net, optimizer, scheduler, anything)
        packed = Packed({**{name: one.state() for name, one in objects.items()}, **values})
    about = {name: one.about() for name, one in objects.items()} | {name: {"kind": "a value"} for name in values}
    # Of plain values rank 0's count: a time or a rank's own loss may differ. All else one rank would load from another.
    if network.groups.mesh.num_devices > 1:
        facts = packed.facts(values)
        facts |= {f"{name} itself": json.dumps(one, sort_keys=True) for name, one in about.items()}
        check_same_on_all_ranks(network, facts)
    _write(Path(path), network, packed, {"about": about, "state": packed.values})


def load(
    path: str | Path, net: nn.Module, optimizer: Optimizer | None = None, *, scheduler: Any = None, **anything: Any
) -> dict[str, Any]:
    """Go on from what `save` has saved, under whatever plan and on however many devices. All ranks call it.

    Rank 0 reads, and tells the others. Everything is checked before anything is changed.

    >>> convoy.save("last", net, optimizer, epoch=3, best=0.98)
    >>> convoy.load("last", net, optimizer)
    {'epoch': 3, 'best': 0.98}

    Args:
        path: folder of the checkpoint.
        net: what `convoy.parallelize` returned, of the same network.
        optimizer: optimizer of the same kind with the same groups, if its state is wanted.
        scheduler: schedule whose state is wanted.
        anything: further objects whose state is wanted, by the names under which they were saved.

    Returns:
        A dictionary of everything else in the checkpoint. Numbers and the like are as they were, tensors are on the
        CPU, and objects that were not given come as their whole state.

    Raises:
        ConvoyError: there is no whole checkpoint of `save`, or it is of another network, optimizer or object.
    """
    network = network_of(net)
    agree("convoy.load", network.groups)
    group = network.groups.world
    checkpoint: Checkpoint | None = None
    with fail_on_all_ranks(network):
        if network.groups.rank == 0:
            checkpoint = _read(Path(path))
    values: dict[str, Any] = broadcast_object({} if checkpoint is None else checkpoint.values, group)
    tensors = broadcast_tensors(None if checkpoint is None else checkpoint.tensors, group)
    with fail_on_all_ranks(network), values_explained(f"checkpoint {path}"):
        about: dict[str, Any] = values["about"]
        saved: dict[str, Any] = unpacked(values["state"], tensors)
        given, plain_values = _given(net, optimizer, scheduler, anything)
        in_parts = [name for name, one in given.items() if type(one) is not _Object]  # one by one
        saved |= {name: replace(saved[name], Tensor, received) for name in saved if name not in in_parts}
        for name in (*given, *plain_values):
            if name not in saved:
                raise ConvoyError(f"{path} holds {', '.join(saved)} and no {name}: leave {name} away")
        if plain_values:
            raise ConvoyError(
                f"{', '.join(plain_values)} is no object that takes a state: give the one whose state was saved, or "
                "leave it away, as convoy.load returns plain values"
            )
        for name, one in given.items():
            if about[name]["kind"] != one.kind:
                raise ConvoyError(
                    f"{name} is {one.kind}, but {about[name]['kind']} in {path}: give what was saved under this name"
                )
            one.check(saved[name], about[name])
    objects = {name: one for name, one in given.items() if name not in in_parts}
    old_states = {name: copy.deepcopy(one.state()) for name, one in objects.items()}
    try:
        with fail_on_all_ranks(network):
            for name, one in objects.items():
                one.load(saved[name], about[name])
    except ConvoyError:
        for name, one in objects.items():
            one.load(old_states[name], about[name])
        raise
    with without_holes(network.device):
        for name in in_parts:
            given[name].load(saved[name], about[name])
    return {name: value for name, value in saved.items() if name not in given and name not in _OWN}


@dataclass
class _Object:
    """An object with a state, by the name under which that is saved."""

    name: str
    value: Any

    kind: ClassVar[str] = "the state of an object"

    def about(self) -> dict[str, Any]:
        """What is to be known beside its state."""
        return {"kind": self.kind, "of": type(self.value).__name__}

    def state(self) -> Any:
        return self.value.state_dict()

    def check(self, saved: Any, about: Mapping[str, Any]) -> None:
        kind = type(self.value).__name__
        if about["of"] not in (kind, "ShardedOptimizer"):  # which versions of before have wrapped around another
            raise ConvoyError(f"{self.name} was saved from {about['of']}, and is {kind} now: give one of that kind")

    def load(self, saved: Any, about: Mapping[str, Any]) -> None:
        try:
            self.value.load_state_dict(saved)
        except Exception as error:
            text = str(error).partition("\n")[0]
            raise ConvoyError(f"{self.name} does not take what was saved ({type(error).__name__}: {text})") from error


class _Module(_Object):
    """A network, or a module that contains some."""

    kind = "a network"

    def about(self) -> dict[str, Any]:
        networks = Parts(self.value).networks.items()
        draws = {place: {"seed": network.context.seed, "passes": network.passes} for place, network in networks}
        return {"kind": self.kind, "draws": draws}

    def state(self) -> Any:
        parts = Parts(self.value)
        if not parts.networks:
            return parts.tensors()
        return {
            name: Whole(partial(parts.whole, name, tensor), parts.shape(name, tensor))
            for name, tensor in parts.tensors().items()
        }

    def check(self, saved: Any, about: Mapping[str, Any]) -> None:
        try:
            Parts(self.value).check(saved)
        except ConvoyError as error:
            raise ConvoyError(f"{self.name} is another network than was saved: {error}") from error

    def load(self, saved: Any, about: Mapping[str, Any]) -> None:
        parts = Parts(self.value)
        parts.load(saved)
        for place, network in parts.networks.items():
            if draws := about["draws"].get(place):
                network.context.seed, network.passes = draws["seed"], draws["passes"]


@dataclass
class _Optimizer(_Object):
    named: NamedOptimizer
    kind = "an optimizer"

    def state(self) -> Any:
        return self.named.state()

    def check(self, saved: Any, about: Mapping[str, Any]) -> None:
        super().check(saved, about)
        self.named.check(saved)

    def load(self, saved: Any, about: Mapping[str, Any]) -> None:
        self.named.load(saved["state"], saved["param_groups"])


def _given(
    net: nn.Module, optimizer: Any, scheduler: Any, anything: Mapping[str, Any]
) -> tuple[dict[str, _Object], dict[str, Any]]:
    """The objects with a state, and plain values, which `convoy.load` returns."""
    given = {"optimizer": optimizer, "scheduler": scheduler}
    values = {**{name: value for name, value in given.items() if value is not None}, **anything}
    for name in _OWN[1:]:
        if name in values and not _has_state(values[name]):
            raise ConvoyError(f"{name} has no state_dict and load_state_dict: give the {name} itself")
    modules: dict[str, nn.Module] = {"net": network_of(net).model}
    modules |= {name: value for name, value in values.items() if isinstance(value, nn.Module)}
    objects: dict[str, _Object] = {name: _Module(name, module) for name, module in modules.items()}
    for name, value in values.items():
        if hasattr(value, "param_groups"):
            objects[name] = _Optimizer(name, value, _named(value, modules))
        elif name not in modules and _has_state(value):
            objects[name] = _Object(name, value)
    return objects, {name: value for name, value in values.items() if name not in objects}


def _named(optimizer: Optimizer, modules: Mapping[str, nn.Module]) -> NamedOptimizer:
    """An optimizer by the names of the module whose parameters it has."""
    parameters = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    owner = next((name for name, module in modules.items() if parameters & set(module.parameters())), "net")
    return NamedOptimizer(modules[owner], optimizer, "the network" if owner == "net" else owner)


def _has_state(value: Any) -> bool:
    return not isinstance(value, type) and hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


_TAG = "$"  # the key of a JSON object that stands for something else than a dictionary with names for keys


class Packed:
    """Nested dictionaries, lists, tuples, numbers, strings, None and tensors, taken apart; a ConvoyError names the
    place of anything else. `values` are the tree as JSON can hold it, `tensors` those in it by their places, such as
    `net/conv.weight` (a slash in a key is `~1` there, RFC 6901), and `leaves` all else, and the shapes of parts, as
    text by their places."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self.tensors: dict[str, Tensor | Whole] = {}
        self.leaves: dict[str, str] = {}
        self.values: dict[str, Any] = {key: self._packed(_join("", key), value) for key, value in tree.items()}

    def contents(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors, whole and one after the other. All ranks go through them."""
        for name, tensor in self.tensors.items():
            yield name, tensor.make() if isinstance(tensor, Whole) else tensor

    def facts(self, free: Collection[str]) -> dict[str, str]:
        """The facts that ranks can compare: all values by their places, with checksums of tensors in one piece. Values
        under the keys `free` may differ, but tensors may not."""
        facts = {place: text for place, text in self.leaves.items() if place.partition("/")[0] not in free}
        for place, value in self.tensors.items():
            if isinstance(value, Tensor):
                content = value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
                facts[place] = f"{value.dtype} {list(value.shape)} {hashlib.sha256(content).hexdigest()}"
        return facts

    def _packed(self, place: str, value: Any) -> Any:
        if isinstance(value, Whole | Tensor):
            return self._noted(place, value)
        if type(value) in (list, tuple):
            items = [self._packed(_join(place, str(i)), item) for i, item in enumerate(value)]
            self.leaves[place] = f"{type(value).__name__} of {len(items)}"
            return items if type(value) is list else {_TAG: "tuple", "items": items}
        if type(value) in (dict, OrderedDict, Counter):
            return self._dictionary(place, value)
        if not isinstance(value, bool | int | float | str | None) and hasattr(value, "item"):
            with suppress(TypeError, ValueError):
                value = value.item()  # a plain number in place of one of numpy's
        self.leaves[place] = repr(value)
        if isinstance(value, float):  # numpy's are too
            return float(value) if math.isfinite(value) else {_TAG: "float", "text": str(float(value))}
        if value is None or type(value) in (bool, int, str):
            return value
        advice = "save what can be, or an object with state_dict and load_state_dict under a name of its own"
        raise ConvoyError(f"{place} is a {type(value).__name__}, which a checkpoint cannot hold: {advice}")

    def _dictionary(self, place: str, value: Mapping[Any, Any]) -> Any:
        bad_key = next((key for key in value if type(key) not in (str, int, float, bool, type(None))), None)
        if bad_key is not None:
            raise ConvoyError(
                f"{place} has the key {bad_key!r}, which a checkpoint cannot hold: make it text or a number"
            )
        items = [self._packed(_join(place, str(key)), item) for key, item in value.items()]
        self.leaves[place] = f"{type(value).__name__} of {len(items)}"
        has_names = all(type(key) is str for key in value) and _TAG not in value and type(value) is not Counter
        if has_names:
            return dict(zip(value, items, strict=True))
        keys = [self._packed(_join(place, f"key of {key}"), key) for key in value]
        kind = "counter" if type(value) is Counter else "dict"
        return {_TAG: kind, "keys": keys, "items": items}

    def _noted(self, place: str, value: Tensor | Whole) -> dict[str, str]:
        if isinstance(value, Tensor):
            value = value.detach()
            if value.layout != torch.strided or value.is_meta or value.dtype not in TYPES:
                kind = f"tensor of {value.dtype} and {value.layout}"
                raise ConvoyError(f"{place} is a {kind}, which safetensors cannot hold: convert it first")
        else:
            self.leaves[place] = f"{list(value.shape)} of all ranks"
        name = place
        while name in self.tensors:
            name += "~"
        self.tensors[name] = value
        return {_TAG: "tensor", "name": name}


def unpacked(values: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What was packed, with whole tensors."""
    if isinstance(values, list):
        return [unpacked(item, tensors) for item in values]
    if not isinstance(values, dict):
        return values
    kind = values.get(_TAG)
    if kind is None:
        return {key: unpacked(item, tensors) for key, item in values.items()}
    if kind == "tensor":
        return tensors[values["name"]]
    if kind == "float":
        return float(values["text"])
    items = unpacked(values["items"], tensors)
    if kind == "tuple":
        return tuple(items)
    mapping = dict(zip(unpacked(values["keys"], tensors), items, strict=True))
    return Counter(mapping) if kind == "counter" else mapping


def _join(place: str, key: str) -> str:
    key = key.replace("~", "~0").replace("/", "~1")
    return f"{place}/{key}" if place else key


def _write(path: Path, network: Network, packed: Packed, values: Mapping[str, Any]) -> None:
    """Write a checkpoint, every rank that sees its folder a share."""
    group, rank = network.groups.world, network.groups.rank
    place = Path(broadcast_object(str(path.resolve()), group))
    folder = place.with_name(f".{place.name}.{broadcast_object(uuid.uuid4().hex, group)}.tmp")
    with fail_on_all_ranks(network), writing(place, _AS_BEFORE):
        if rank == 0:
            _check_place(place)
            sweep(place.parent, glob.escape(place.name))
            folder.mkdir(parents=True)
    stamps = gather_objects(stamp(folder), group)
    writers = [other for other, other_stamp in enumerate(stamps) if other_stamp == stamps[0]]
    number = writers.index(rank) if rank in writers else None
    draft = Draft(folder, 0, len(writers))
    try:
        shard = snapshot(packed.contents(), number, len(writers))
        with fail_on_all_ranks(network), writing(place, _AS_BEFORE):
            if number is not None:
                draft.add(number, shard)
        with fail_on_all_ranks(network), writing(place, _AS_BEFORE):
            if rank == 0:
                draft.put(place, _IDENTITY, values)
    except BaseException:
        if rank == 0:
            draft.discard()
        raise


def _check_place(place: Path) -> None:
    """See that a checkpoint may be put there: nothing is there, or an earlier one of the same kind."""
    if not place.exists() or (place.is_dir() and not any(place.iterdir())):
        return
    if not place.is_dir() or {entry.name for entry in place.iterdir()} != {RECORD, STATE}:
        raise ConvoyError(f"{place} is there and no checkpoint: give convoy.save another path, or remove it")
    if _identity(place) not in (None, _IDENTITY):
        raise ConvoyError(f"{place} is a checkpoint of convoy train: give convoy.save another path")


def _identity(place: Path) -> Any:
    """The program that wrote the checkpoint; None for a damaged one."""
    try:
        return json.loads((place / RECORD).read_text(encoding="utf-8"))["identity"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _read(path: Path) -> Checkpoint:
    if not path.exists():
        raise ConvoyError(f"{path} is not there: give the path that convoy.save was given")
    if not (path / RECORD).is_file():
        raise ConvoyError(f"{path} is no checkpoint (it has no {RECORD}): give the path that convoy.save was given")
    checkpoint = read_checkpoint(path)
    if checkpoint.identity != _IDENTITY:
        raise ConvoyError(
            f"{path} is a checkpoint of convoy train, not of convoy.save: go on with its run by --resume, or load the "
            "run's weights.safetensors into the plain network before convoy.parallelize"
        )
    return checkpoint
