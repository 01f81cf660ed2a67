"""What a recipe leaves open, settled for the devices of a run: precision, memory format, fused optimizers; and training
in low precision: the scale of fp16's loss, and torch's switches.

Open choices are settled once, where a run begins, alike on all ranks, and kept in its `config.yaml`: a run goes on as
it was begun, wherever it goes on, and does not change its numbers in the middle without a word. All that differs from
fp32's numbers follows from the precision.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from convoy import resources
from convoy.comm.ranks import Ranks
from convoy.recipe.recipe import Recipe
from convoy.run.records import Derived
from convoy.training.derived import num_threads

BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # what Linux calls it on x86 and on Arm


@dataclass(frozen=True)
class Settled:
    """A recipe that leaves nothing open."""

    recipe: Recipe
    notes: list[str]  # a sentence on each choice, with what turns it off
    derived: list[Derived]  # the same for the report


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
    return not BF16_FLAGS.isdisjoint(resources.processor_flags())


def settle(recipe: Recipe, device: torch.device, ranks: Ranks | None = None) -> Settled:
    """Choose what a recipe leaves open, for the weakest of the ranks' devices (without ranks, for this one). All ranks
    call it.
    """
    ranks, open_keys = ranks or Ranks(), _open_keys(recipe)
    if not open_keys:
        return Settled(recipe, list(_to_know(recipe, device)), [])
    notes: list[str] = []
    derived: list[Derived] = []
    devices = ranks.gather(_ability(device))
    on_gpus = all(ability.type == "cuda" for ability in devices)
    if "precision" in open_keys:
        precision, why, is_told = _precision(recipe, devices)
        recipe = recipe.model_copy(update={"precision": precision})
        notes += [f"precision {precision}: {why}"] if is_told else []
        derived.append(Derived("precision", precision, why, "docs/gpus.md"))
    lowered = on_gpus and recipe.precision != "fp32"
    if "channels_last" in open_keys:
        recipe = recipe.model_copy(update={"channels_last": lowered})
        if lowered:
            why = f"channels lie innermost, as {recipe.precision} convolutions on GPUs take them"
            notes.append(f"channels_last: {why} (--channels-first turns it off)")
            derived.append(Derived("memory format", "channels_last", why, "docs/gpus.md"))
    # A CPU reads and writes the weights once then, not for each term of the formula: SGD of AlexNet takes a core 56 ms
    # for 232. The bits are those of other kernels but for the ends of tensors.
    on_cpus = all(ability.type == "cpu" for ability in devices) and not recipe.reproducible
    if "optimizer.fused" in open_keys and (lowered or on_cpus):
        recipe = recipe.model_copy(update={"optimizer": recipe.optimizer.model_copy(update={"fused": True})})
        why = "the update of all weights is one kernel"
        notes += [f"fused optimizer: {why} (--set optimizer.fused=false turns it off)"] if lowered else []
        derived.append(Derived("optimizer", "fused", why, "docs/gpus.md"))
    return Settled(recipe, [*notes, *_to_know(recipe, device)], derived)


def as_begun(recipe: Recipe, begun: Recipe) -> Recipe:
    """A recipe whose open choices are those of the run that it goes on with."""
    choices = {key: getattr(begun, key) for key in _open_keys(recipe) if "." not in key}
    if "optimizer.fused" in _open_keys(recipe) and begun.optimizer.name == recipe.optimizer.name:
        fused = bool(getattr(begun.optimizer, "fused", None))  # earlier versions kept no choice, and fused nothing
        choices["optimizer"] = recipe.optimizer.model_copy(update={"fused": fused})
    return recipe.model_copy(update=choices)


def _open_keys(recipe: Recipe) -> list[str]:
    """Keys of the recipe that are for its devices to say."""
    keys = ["precision"] if recipe.precision in (None, "auto") else []
    keys += ["channels_last"] if recipe.channels_last is None else []
    return [*keys, "optimizer.fused"] if getattr(recipe.optimizer, "fused", True) is None else keys


def _ability(device: torch.device) -> _Ability:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"
    return _Ability(device.type, name, has_bf16(device))


def _precision(recipe: Recipe, devices: list[_Ability]) -> tuple[str, str, bool]:
    """The precision, why, and whether the log is to say so.

    On a CPU bf16 is only for who asks: it lets ResNet-18 take 0.69 of fp32's time, but LeNet 1.3 times
    (docs/benchmarks/cpu-bf16.md).
    """
    on_gpus = all(ability.type == "cuda" for ability in devices)
    if recipe.reproducible:
        return "fp32", "a reproducible run does not follow its device (--precision bf16 is another choice)", on_gpus
    if recipe.precision is None and not on_gpus:
        return "fp32", "as on every CPU (--precision auto takes bf16 from those that have it)", False
    rank = next((rank for rank, ability in enumerate(devices) if not ability.bf16), None)
    if rank is None:
        return "bf16", "layers compute in bf16, weights stay in fp32 (--precision fp32 turns it off)", True
    name = devices[rank].name
    which = name if len(devices) == 1 or not on_gpus else f"{name}, the device of rank {rank},"
    other = " (--precision fp16 is another choice)" if on_gpus else ": neither avx512_bf16 nor amx"
    return "fp32", f"{which} has no bf16 in hardware{other}", True


def _to_know(recipe: Recipe, device: torch.device) -> Iterator[str]:
    """Sentences on what the device makes of the precision."""
    if device.type == "cpu" and recipe.precision != "fp32" and not has_bf16(device):
        yield f"precision {recipe.precision}: without hardware for it, this CPU may take longer than in fp32"
    if device.type == "cuda" and recipe.precision == "fp32" and torch.cuda.get_device_capability(device) >= (8, 0):
        cudnn: Any = torch.backends.cudnn
        switches = (("convolutions", cudnn.conv), ("matrix products", torch.backends.cuda.matmul))
        what = " and ".join(name for name, switch in switches if switch.fp32_precision == "tf32")
        if what:
            yield f"TF32: {what} in fp32 multiply in TF32 (NVIDIA_TF32_OVERRIDE=0 in the environment turns it off)"


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Scaler(torch.amp.GradScaler):
    """Scales the loss so that gradients in fp16 do not vanish, and skips updates in which some overflowed. With any
    other precision it does nothing, and asks nobody.

    Where ranks hold different gradients, only the rank that has the part that overflowed would know of it, and the
    weights and the scale would drift apart: all ranks agree once for each update, for which each reads its device.
    `anywhere` tells whether something holds on any rank, and all ranks call it; None where all of them have the same
    gradients: then nothing is read.
    """

    def __init__(
        self, device: torch.device, precision: str | None, anywhere: Callable[[bool], bool] | None = None
    ) -> None:
        super().__init__(device.type, enabled=precision == "fp16")
        self._anywhere = anywhere
        if self.is_enabled():
            self.scale(torch.zeros((), device=device))  # a stage without the loss never does, and torch asks for it

    def _unscale_grads_(self, *args: Any, **options: Any) -> dict[torch.device, torch.Tensor]:
        """Torch's own name: gives for every device a number that is not 0 if gradients on it overflowed."""
        overflows = super()._unscale_grads_(*args, **options)
        if self._anywhere is None:
            return overflows
        overflowed_on_rank = any(bool(number) for number in overflows.values())
        if self._anywhere(overflowed_on_rank) and not overflowed_on_rank:
            for number in overflows.values():
                number.fill_(1.0)
        return overflows


def autocast_of(recipe: Recipe, device: torch.device) -> AbstractContextManager[Any]:
    """The context of a forward pass in the recipe's precision."""
    precision = lowered(recipe)
    return contextlib.nullcontext() if precision is None else torch.autocast(device.type, precision)


def lowered(recipe: Recipe) -> torch.dtype | None:
    """In which type autocast has layers compute; None without it, and where that is left open."""
    return None if recipe.precision in (None, "auto", "fp32") else DTYPES[recipe.precision]


def set_numerics(recipe: Recipe) -> None:
    """Set the process's threads and torch's switches as the recipe asks."""
    torch.set_num_threads(num_threads(recipe))
    if recipe.reproducible:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS refuses to be deterministic
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs time
    torch.use_deterministic_algorithms(recipe.reproducible)
    torch.backends.cudnn.benchmark = not recipe.reproducible
