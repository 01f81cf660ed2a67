"""What a run goes on from: whether a recipe may go on with a run that another one began, and from which checkpoint; and
what its network computes, in words, kept in checkpoints, so that no run is gone on with by other code unnoticed.

A run made longer is a new one that begins with the state at the end of a finished one, of which nothing changes: a
longer `--resume` would change what a run directory says it is. Its schedule is that of the whole, new length, as in
timm's trainer: the old one's last rate is 0 for a cosine, and a second cosine (SGDR) is another experiment.
"""

import hashlib
import json
import re
import socket
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from convoy.checkpoint.files import Checkpoint
from convoy.checkpoint.store import CheckpointStore
from convoy.comm.ranks import Ranks
from convoy.data.dataset import DataSet, difference, num_changed
from convoy.documents import show
from convoy.errors import ConvoyError
from convoy.graph.graph import Call, Graph, Ref
from convoy.own import checksum
from convoy.recipe.parallel_config import PLACEMENT
from convoy.recipe.recipe import Recipe, load_recipe
from convoy.recipe.schema import Duration
from convoy.run.directory import RunDirectory
from convoy.training.build import NetworkInput
from convoy.training.derived import resolve
from convoy.training.precision import as_begun


def load_latest(
    store: CheckpointStore, identity: str, ranks: Ranks, step: int | None = None
) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint, or that of an update, that rank 0 finds whole, on every rank (None where there is none at
    all), and a sentence for each damaged one passed over; a DamagedCheckpointError where all of them are. All ranks
    call it.
    """
    latest: Checkpoint | None = None

    def read() -> tuple[Checkpoint | None, list[str]]:
        nonlocal latest
        latest, refused = store.load_latest(identity, step)
        return replace(latest, tensors={}) if latest is not None else None, refused

    checkpoint, refused = ranks.first(read)
    if checkpoint is None:
        return None, refused
    return replace(checkpoint, tensors=ranks.broadcast_tensors(latest.tensors if latest is not None else None)), refused


def check_run(run: RunDirectory, recipe: Recipe, resume: bool) -> bool:
    """Whether there is a run to go on with; a ConvoyError where this recipe may not, or the folder is taken or cannot
    be written.
    """
    if resume and run.is_run():
        check_same(recipe, load_recipe(str(run.config)), run)
        return True
    run.check_free()
    return False


# Keys that change no result, or whose change a reader of the curve sees: a run may go on with other ones.
FREE = (
    "data.workers",
    "data.path",
    "checkpoint",
    "log_every",
    "noise_scale",
    "log",
    "on_nan",
    "evaluate_every",
    "optimizer.fused",
    "cuda_graphs",
    "recompute",
    *(f"parallel.{key}" for key in PLACEMENT),
)


def check_same(recipe: Recipe, begun: Recipe, run: RunDirectory) -> None:
    """Refuse to go on with a run under a recipe that would change its result; the ConvoyError names the first key that
    differs.

    What the recipe leaves open stays as it was begun. How often to log, evaluate and save, the number of workers, the
    place of the data, devices and plan may change.
    """
    for key, now, before in differences(recipe, begun):
        ways = "or begin a new run in another --out"
        if key == "epochs":
            more = recipe.epochs.value - begun.epochs.value if recipe.epochs.unit == begun.epochs.unit else 0
            by = Duration(round(more, 9), begun.epochs.unit) if more > 0 else recipe.epochs
            ways = (
                f"or, when it is finished, make it longer in a new run (convoy train {run.path} --extend {by}), or "
                f"begin a new run with its weights (--weights {run.path})"
            )
        raise ConvoyError(
            f"{run.path} was begun with {key}={show(before)} and cannot go on with {key}={show(now)}: "
            f"leave that option away, {ways}"
        )


def check_ranks(data: DataSet, ranks: Ranks) -> None:
    """Refuse data that are not the same on all ranks, naming one, its host and what differs. All ranks call it."""
    (first, expected), *other_ranks = ranks.gather((socket.gethostname(), data.fingerprint))
    for rank, (host, fingerprint) in enumerate(other_ranks, 1):
        if (difference_of_ranks := difference(fingerprint, expected)) is not None:
            what, value, expected_value = difference_of_ranks
            how = f"is {value} for rank {rank} on {host}, and {expected_value} for rank 0 on {first}"
            how = how if value else f"differ between rank {rank} on {host} and rank 0 on {first}"
            raise ConvoyError(f"the data are not the same everywhere: {what} {how}: give all hosts the same files")


def check_data(data: DataSet, run: RunDirectory) -> None:
    """Refuse data that are not those a run was begun on, as far as it has noted what those were; the ConvoyError names
    what differs. Where they lie may change: `config.yaml` keeps the first place.
    """
    begun, changes = run.begun_by(), list[str]()
    with suppress(KeyError, TypeError, AttributeError):  # not noted, or by somebody else
        if (change := difference(data.fingerprint, begun["data"], later=True)) is not None:
            what, is_now, was = change
            changes.append(f"{what} was {was} and is {is_now}" if was else f"{what} have changed")
    with suppress(KeyError, TypeError, AttributeError):
        for key, value in NetworkInput.of(data).model_dump(mode="json").items():
            if key != "in_memory" and begun["input"][key] != value:  # how they are kept, not what they are
                was_and_is = f"was {show(begun['input'][key])} and is {show(value)}"
                changes.append("other classes" if key == "classes" else f"{key} {was_and_is}")
    if changes:
        raise ConvoyError(
            f"the data are not those that {run.path} was begun on ({changes[0]}): name the same data by --data, or "
            "begin a new run in another --out"
        )


def moved_data(recipe: Recipe, run: RunDirectory) -> str | None:
    """The sentence where the data come from another place than when the run was begun."""
    before = load_recipe(str(run.config)).data.path
    if Path(before).resolve() == Path(recipe.data.path).resolve():
        return None
    return f"the data come from {recipe.data.path}, not from {before} as when the run was begun"


def since_begun(
    recipe: Recipe, data: DataSet, run: RunDirectory, machine: dict[str, str | int]
) -> Iterator[tuple[str, dict[str, str | int]]]:
    """A sentence for each thing that is otherwise than when the run was begun, and need not stop it, with what to note
    of it: the place of the data, sizes of files, and of a reproducible run the machine (`environment.machine`).
    """
    begun = run.begun_by()
    if (moved := moved_data(recipe, run)) is not None:
        yield moved, {"data": recipe.data.path}
    with suppress(KeyError, TypeError, AttributeError):
        before, now = (
            [size for split in ("training", "test") for size in fingerprint[split].get("sizes", ())]
            for fingerprint in (begun["data"], data.fingerprint)
        )
        if changed := num_changed(now, before):
            yield f"{changed} of {len(now)} files that were looked at have another size than when the run was begun", {}
    for name in recipe.own_code().values():
        with suppress(KeyError, TypeError):
            if begun["own"][name] != (now_code := checksum(name)):
                yield f"the file of {name} is another than when the run was begun", {name: now_code}
    was = {key: value for key, value in begun.items() if key in ("machine", "kernels")}
    if recipe.reproducible and any(machine.get(key) != value for key, value in was.items()):
        first, second = (" with ".join(map(str, facts.values())) for facts in (was, machine))
        sentence = (
            f"the run was begun on {first} and continues on {second}: its numbers may differ in their last bits "
            "from those of a run that stays on one kind of processor"
        )
        yield sentence, machine


def differences(recipe: Recipe, begun: Recipe, free: Sequence[str] = ()) -> Iterator[tuple[str, Any, Any]]:
    """Keys that define the result and differ, with both values, but for those that are `free`; what a recipe leaves
    open is as it was begun."""
    now, before = (dict(leaves(version)) for version in (as_begun(recipe, begun), begun))
    for key in dict.fromkeys([*now, *before]):
        if now.get(key) != before.get(key) and not _is_below(key, (*FREE, *free)):
            yield key, now.get(key), before.get(key)


# Keys that came later, whose defaults are what runs of before had in effect: their checksum is without these.
ADDED = (
    *("extends", "extends_at", "target", "lookahead", "best", "stop_after", "task", "evaluation_views", "metrics"),
    *("model.whiten", "optimizer.groups", "optimizer.freeze", "optimizer.layer_decay"),
    *(f"loss.{key}" for key in ("target_threshold", "class_weights", "threshold", "name", "function")),
    *(f"data.{key}" for key in ("sampling", "decoder", "evaluation_size", "progressive", "repeats", "classes")),
    *("data.ignore_index", "data.fold"),
    *(f"data.augment.{key}" for key in ("padding", "function", "trivial_augment", "random_erasing")),
    *(f"parallel.averaging.{key}" for key in ("start", "outer_momentum", "staleness", "outer_lr", "outer_nesterov")),
)


def identity(recipe: Recipe, num_train: int, num_test: int) -> str:
    """A checksum of all that defines the result of a run: the recipe's keys, and how many samples the data has."""
    usual = dict(leaves(Recipe.model_validate({"data": {"path": "any"}, "model": {"name": "any"}})))
    later = {key: usual[key] for key in ADDED}
    fixed = {key: v for key, v in leaves(recipe) if not _is_below(key, FREE) and (key, v) not in later.items()}
    text = json.dumps([fixed, num_train, num_test], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _is_below(key: str, names: Sequence[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def leaves(document: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of a recipe, dotted, with its value."""
    for key, value in (document.model_dump(mode="json") if isinstance(document, Recipe) else document).items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


# Keys of the recipe that may be others than the old run's, beside those that never change a result.
MAY_CHANGE = (
    "epochs",
    "extends",
    "extends_at",
    "target",
    "schedule",
    "optimizer.lr",
    "optimizer.base_lr",
    "loss",
    "clip_norm",
    "evaluation_views",
    "data.augment",
    "data.mix",
    "data.progressive",
    "data.repeats",
    "reproducible",
    "threads",
    "compile",
    "channels_last",
)


# And of a run that branches off another one, with the samples that come next there in other batches.
_BRANCH_MAY_CHANGE = (*MAY_CHANGE, "batch", "microbatch", "microbatches")


def check_extension(recipe: Recipe) -> None:
    """Refuse a recipe that cannot begin with the state of the run that it extends: there is no such run, it is not
    finished, or the recipe differs in what the state is made of.
    """
    old = extended(recipe)
    if not old.is_run():
        raise ConvoyError(f"extends={recipe.extends} is no run directory (it has no config.yaml): name one")
    status = old.summary().get("status")
    branches = recipe.extends_at is not None
    if status != "finished" and not branches:
        raise ConvoyError(
            f"{old.path} is not finished ({f'its summary says {status}' if status else 'it has no summary'}), so there "
            f"is nothing to extend yet: go on with it by convoy train {old.path} --resume"
        )
    if not CheckpointStore(old.checkpoints).steps():
        raise ConvoyError(
            f"{old.path} has no checkpoints any more, so its state is not known: begin a new run with its weights, "
            f"--weights {old.path}"
        )
    begun = load_recipe(str(old.config))
    for key, now, before in differences(recipe, begun, _BRANCH_MAY_CHANGE if branches else MAY_CHANGE):
        raise ConvoyError(
            f"{old.path} was trained with {key}={show(before)}, so a run that extends it cannot have "
            f"{key}={show(now)}: leave that option away, or begin a new run with its weights (--weights {old.path})"
        )
    if branches:
        return
    if recipe.epochs == begun.epochs or begun.epochs.longer_than(recipe.epochs):
        raise ConvoyError(
            f"a run of epochs={recipe.epochs} does not extend {old.path}, which has {begun.epochs}: make it longer"
        )


def extended(recipe: Recipe) -> RunDirectory:
    """The run that a recipe's run begins with."""
    assert recipe.extends is not None
    return RunDirectory(Path(recipe.extends))


def state_at_end(recipe: Recipe, data: DataSet, ranks: Ranks) -> tuple[Checkpoint, list[str]]:
    """The state at the end of the run that a recipe extends, the same on all ranks, and sentences on it; a ConvoyError
    where no checkpoint can be used, or the data are not those of that run. All ranks call it.
    """
    old = extended(recipe)
    ranks.first(lambda: check_data(data, old))
    begun = ranks.first(lambda: load_recipe(str(old.config)))
    name = identity(begun, len(data.train), len(data.test))
    checkpoint, notes = load_latest(CheckpointStore(old.checkpoints), name, ranks, recipe.extends_at)
    if checkpoint is None:
        raise ConvoyError(f"the checkpoints of {old.path} have been removed: put them back, or begin another run")
    ended, now = resolve(begun, len(data.train)), resolve(recipe, len(data.train))
    done, total = checkpoint.step, ended.total_updates
    if recipe.extends_at is not None:  # the same place in the data, in updates of this batch
        begins = max(1, round(done * now.updates_per_epoch / ended.updates_per_epoch))
        notes.append(f"begins with the state of {old.path} after {done:,} updates of {begun.batch}")
        values = checkpoint.values
        if values.get("ema"):  # updates that an average has seen
            values = {**values, "ema": round(values["ema"] * begins / done)}
        return replace(checkpoint, step=begins, values=values), notes
    rates = f"{ended.schedule.lr(done - 1):.3g} at its end, {now.schedule.lr(done):.3g} from here on"
    notes.append(
        f"begins with the state of {old.path} after {done:,} updates"
        + (f" (of {total:,}: that is its newest checkpoint)" if done < total else "")
        + f"; the learning rate, {rates}, is that of a run of {recipe.epochs}"
    )
    return checkpoint, notes


# Of every call in training, in order: its layer; the function with its constants; the shapes of its outputs; and a
# checksum of its inputs.
Code = list[list[str]]
_OF_THIS_PROCESS = re.compile(r"(, )?(device=)?device\([^)]*\)| at 0x[0-9a-f]+")


class OtherCodeError(ConvoyError):
    """The network computes something else than when the checkpoint was written; the run is as it was."""


def code_of(model: nn.Module, graph: Graph | None) -> Code:
    """Of the plain network, which does not depend on the plan; without a graph, of the layers that it has."""
    if graph is None:
        layers = ((name, module) for name, module in model.named_modules() if name)
        return [[name, f"{type(module).__name__}({module.extra_repr()})", "", ""] for name, module in layers]
    return [[call.layer, _function(call), _shapes(call, graph), _taken(call, graph)] for call in graph.calls]


def code_difference(was: Code, now: Code) -> str:
    """The first layer that differs, and in what; empty where none does.

    >>> code_difference([["act", "silu", "2x4", "1"]], [["act", "relu", "2x4", "1"]])
    'layer act was silu and is relu'
    """
    place = next((i for i, (one, other) in enumerate(zip(was, now, strict=False)) if one != other), None)
    if place is None:
        rest = was[len(now) :] or now[len(was) :]
        return f"{rest[0][1]} of {_who(rest[0][0])} is {'new' if len(now) > len(was) else 'gone'}" if rest else ""
    (layer, function, shapes, _), (own_layer, own_function, own_shapes, _) = was[place], now[place]
    if layer != own_layer:
        return f"{own_function} of {_who(own_layer)} comes where {function} of {_who(layer)} came"
    if function != own_function:
        return f"{_who(layer)} was {function} and is {own_function}"
    if shapes != own_shapes:
        return f"{_who(layer)}, {function}, gave {shapes} and gives {own_shapes}"
    return f"{_who(layer)}, {function}, takes other tensors than it took"


def _who(layer: str) -> str:
    return f"layer {layer}" if layer else "the network itself"


def _function(call: Call) -> str:
    """Alike whether it is an operator, a method or a function, and whether it changes its input in place."""
    arguments = [repr(value) for value in call.args if not isinstance(value, Ref)]
    named = ((key, value) for key, value in call.kwargs.items() if key != "inplace" and value is not None)
    arguments += [f"{key}={value!r}" for key, value in named if not isinstance(value, Ref)]
    name = str(getattr(call.function, "__name__", type(call.function).__name__)).strip("_")
    constants = _OF_THIS_PROCESS.sub("", ", ".join(arguments))
    return f"{name}({constants})" if constants else name


def _shapes(call: Call, graph: Graph) -> str:
    return ", ".join("x".join(map(str, graph.shape(name))) for name in call.outputs)


def _taken(call: Call, graph: Graph) -> str:
    inputs = [name + (_numbers(graph.constants[name]) if name in graph.constants else "") for name in call.inputs]
    return f"{zlib.crc32(repr(inputs).encode()):08x}"


def _numbers(constant: Tensor) -> str:
    """Their last digits may be others on another processor."""
    x = constant.detach().cpu().flatten()
    x = (torch.view_as_real(x).flatten() if x.is_complex() else x).double()
    size, places = float(x.abs().sum()), torch.arange(1, len(x) + 1, dtype=torch.float64)
    return f"{size:.4g} {float(x @ places) / (size * len(x) or 1):.3f}"
