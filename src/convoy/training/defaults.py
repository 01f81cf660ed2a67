"""What a recipe leaves open, settled for the devices of a run: precision, memory format, fused optimizers.

That is done once, where a run begins, alike on all ranks, and kept in its `config.yaml`: a run goes on as it was begun,
wherever it goes on.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from convoy import processor
from convoy.comm.ranks import Ranks
from convoy.data.sources import Progress
from convoy.engine import microbatch_sizes, prepare
from convoy.graph.given import copied
from convoy.graph.tree import leaves
from convoy.planner.cost.device import this_device
from convoy.planner.cost.store import ProfileStore
from convoy.training.build import merged, probed
from convoy.training.derived import num_microbatches
from convoy.training.precision import autocast_of
from convoy.training.recipe import Recipe
from convoy.training.records import Derived

BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
"""What Linux calls it on x86 and on Arm."""
ROUNDS, LONG_S = 5, 10.0
"""Timed passes in each precision; fewer where they take longer than so many seconds."""
WORTH = 0.95
"""Part of fp32's time that bf16 has to stay below to be taken, as it rounds more."""


@dataclass(frozen=True)
class Settled:
    """A recipe that leaves nothing open.

    Attributes:
        notes: a sentence on each choice, with what turns it off.
        derived: the same for the report.
    """

    recipe: Recipe
    notes: list[str]
    derived: list[Derived]


@dataclass(frozen=True)
class Tried:
    """Seconds of a forward and backward pass of so many samples, of the slowest rank."""

    samples: int
    fp32_s: float
    bf16_s: float


@dataclass(frozen=True)
class _Ability:
    """Of a rank's device."""

    type: str
    name: str
    bf16: bool


def has_bf16(device: torch.device) -> bool:
    """Whether a device multiplies in bf16 by hardware: GPUs since Ampere, CPUs that say so."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return not BF16_FLAGS.isdisjoint(processor.flags())


def settle(
    recipe: Recipe,
    device: torch.device,
    ranks: Ranks | None = None,
    trial: Callable[[Recipe], Tried] | None = None,
) -> Settled:
    """Choose what a recipe leaves open, for the device that can least. All ranks call it.

    Args:
        recipe: what is trained, and how.
        device: this rank's.
        ranks: all ranks; None for one device.
        trial: measures passes of a recipe in fp32 and in bf16, for `precision=auto` on CPUs; None tries nothing, and
            fp32 is taken.
    """
    ranks, was_open = ranks or Ranks(), _open_keys(recipe)
    notes: list[str] = []
    derived: list[Derived] = []
    if was_open:
        able = ranks.gather(_ability(device))
        on_gpus = all(one.type == "cuda" for one in able)
        if "precision" in was_open:
            precision, why, is_told = _precision(recipe, able, trial)
            recipe = recipe.model_copy(update={"precision": precision})
            notes += [f"precision {precision}: {why}"] if is_told else []
            derived.append(Derived("precision", precision, why, "docs/gpus.md"))
        lowered = on_gpus and recipe.precision != "fp32"
        if "channels_last" in was_open:
            recipe = recipe.model_copy(update={"channels_last": lowered})
            if lowered:
                why = f"channels lie innermost, as {recipe.precision} convolutions on GPUs take them"
                notes.append(f"channels_last: {why} (--channels-first turns it off)")
                derived.append(Derived("memory format", "channels_last", why, "docs/gpus.md"))
        if "optimizer.fused" in was_open and lowered:
            recipe = recipe.model_copy(update={"optimizer": recipe.optimizer.model_copy(update={"fused": True})})
            why = "the update of all weights is one kernel"
            notes.append(f"fused optimizer: {why} (--set optimizer.fused=false turns it off)")
            derived.append(Derived("optimizer", "fused", why, "docs/gpus.md"))
    return Settled(recipe, [*notes, *_to_know(recipe, device)], derived)


def as_begun(recipe: Recipe, begun: Recipe) -> Recipe:
    """A recipe whose open choices are those of the run that it goes on with."""
    found = {key: getattr(begun, key) for key in _open_keys(recipe) if "." not in key}
    if "optimizer.fused" in _open_keys(recipe) and begun.optimizer.name == recipe.optimizer.name:
        fused = bool(getattr(begun.optimizer, "fused", None))  # earlier versions kept no choice, and fused nothing
        found["optimizer"] = recipe.optimizer.model_copy(update={"fused": fused})
    return recipe.model_copy(update=found)


def _open_keys(recipe: Recipe) -> list[str]:
    """Keys of the recipe that are for its devices to say."""
    found = ["precision"] if recipe.precision in (None, "auto") else []
    found += ["channels_last"] if recipe.channels_last is None else []
    return [*found, "optimizer.fused"] if getattr(recipe.optimizer, "fused", True) is None else found


def _ability(device: torch.device) -> _Ability:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"
    return _Ability(device.type, name, has_bf16(device))


def _precision(recipe: Recipe, able: list[_Ability], trial: Callable[[Recipe], Tried] | None) -> tuple[str, str, bool]:
    """The precision, why, and whether the log is to say so."""
    on_gpus = all(one.type == "cuda" for one in able)
    if recipe.reproducible:
        return "fp32", "a reproducible run does not follow its device (--precision bf16 is another choice)", on_gpus
    if recipe.precision is None and not on_gpus:
        return "fp32", "as on every CPU (--precision auto tries bf16)", False
    rank, lacking = next(((rank, one) for rank, one in enumerate(able) if not one.bf16), (0, None))
    if lacking is not None:
        which = lacking.name if len(able) == 1 or not on_gpus else f"{lacking.name}, the device of rank {rank},"
        other = " (--precision fp16 is another choice)" if on_gpus else ": neither avx512_bf16 nor amx"
        return "fp32", f"{which} has no bf16 in hardware{other}", True
    if on_gpus:
        return "bf16", "layers compute in bf16, weights stay in fp32 (--precision fp32 turns it off)", True
    if trial is None or any(one.type == "cuda" for one in able):
        return "fp32", "bf16 was not tried", True
    chosen = recipe.model_copy(update={"precision": "fp32", "channels_last": bool(recipe.channels_last)})
    found = trial(chosen)
    ratio = found.bf16_s / found.fp32_s
    said = f"a pass of {found.samples} images takes {1e3 * found.bf16_s:.4g} ms, {ratio:.2f} of its time in fp32"
    if ratio < WORTH:
        return "bf16", f"{said} (--precision fp32 turns it off)", True
    return "fp32", f"in bf16 {said}", True


def _to_know(recipe: Recipe, device: torch.device) -> Iterator[str]:
    """Sentences on what the device makes of the precision."""
    if device.type == "cpu" and recipe.precision != "fp32" and not has_bf16(device):
        yield f"precision {recipe.precision}: without hardware for it, this CPU may take longer than in fp32"
    if device.type == "cuda" and recipe.precision == "fp32" and torch.cuda.get_device_capability(device) >= (8, 0):
        cudnn: Any = torch.backends.cudnn
        each = (("convolutions", cudnn.conv), ("matrix products", torch.backends.cuda.matmul))
        what = " and ".join(name for name, switch in each if switch.fp32_precision == "tf32")
        if what:
            yield f"TF32: {what} in fp32 multiply in TF32 (NVIDIA_TF32_OVERRIDE=0 in the environment turns it off)"


def try_passes(
    recipe: Recipe,
    model: nn.Module,
    image_shape: tuple[int, int, int],
    devices: int,
    device: torch.device,
    ranks: Ranks,
    store: ProfileStore | None,
    change: str,
    say: Progress | None = None,
) -> Tried:
    """Measure forward and backward passes of a device's microbatches in fp32 and in bf16. All ranks call it.

    What was measured before of the same network on the same device, is taken from the store.

    Args:
        recipe: settled but for the precision.
        model: its network, which is left as it is.
        image_shape: channels, height, width.
        devices: that share the batch.
        device: this rank's.
        ranks: that measure at once.
        store: keeps the times; None keeps nothing.
        change: what a user could change where the network cannot train on such images.
        say: is told of the work.

    Raises:
        ConvoyError: the network cannot train on such images.
    """
    sizes = microbatch_sizes(recipe.batch, num_microbatches(recipe))
    found = probed(model, recipe, image_shape, sizes, device, change)
    own = sizes[: min(merged(recipe, found, sizes, device)[0], -(-len(sizes) // devices))]
    here = this_device(device, channels_last=bool(recipe.channels_last), neighbours=ranks.on_host)
    numbers = sum(weight.numel() for weight in model.parameters())
    network = f"{recipe.model.name} {json.dumps(recipe.model.options, sort_keys=True)} of {numbers} weights"
    name = f"bf16 beside fp32: {network}, {recipe.batch_norm}, {own} of {image_shape}"
    known = ranks.first(lambda: store.noted(here, name) if store is not None else None)
    if known is None:
        if say is not None and ranks.rank == 0:
            say("trying bf16", 0, 1)
        every = ranks.gather(_times(recipe, model, image_shape, own, device))
        known = [max(times) for times in zip(*every, strict=True)]
        if store is not None and ranks.rank == 0:
            with suppress(OSError):  # a full disk is no reason to stop
                store.note(here, name, known)
    return Tried(sum(own), *known)


def _times(
    recipe: Recipe, plain: nn.Module, image_shape: tuple[int, int, int], sizes: tuple[int, ...], device: torch.device
) -> list[float]:
    """Seconds of a pass in fp32 and in bf16: the least of some in turn, as what else runs only adds to them."""
    memory_format = torch.channels_last if recipe.channels_last else torch.contiguous_format
    model: nn.Module = copied(plain).to(memory_format=memory_format)  # type: ignore[call-overload]
    context = prepare(model.train(), recipe.seed, recipe.batch_norm)
    recipes = [recipe.model_copy(update={"precision": precision}) for precision in ("fp32", "bf16")]
    seconds: list[list[float]] = [[], []]
    with torch.random.fork_rng(devices=[]):
        images = torch.rand(sum(sizes), *image_shape, device=device).contiguous(memory_format=memory_format)
        began = time.perf_counter()
        while len(seconds[0]) <= ROUNDS and (len(seconds[0]) < 2 or time.perf_counter() - began < LONG_S):
            for one, taken in zip(recipes, seconds, strict=True):
                context.enter(0, 0, sizes, device)
                model.zero_grad(set_to_none=True)
                start = time.perf_counter()
                with autocast_of(one, device):
                    outputs = leaves(model(images), Tensor)
                torch.stack([output.float().square().mean() for output in outputs]).sum().backward()
                taken.append(time.perf_counter() - start)
    return [min(taken[1:]) for taken in seconds]
