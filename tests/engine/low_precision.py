"""How far training under autocast is from training in float32, with a plan and without one."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from exactness import build
from torch import Tensor, nn

import convoy
from convoy.engine.network import network_of


@dataclass
class Closeness:
    """The type of outputs under the plan; errors of outputs and of gradients relative to the plain network in float32,
    under autocast without a plan, and with it."""

    dtype: torch.dtype
    plain: list[float]
    plan: list[float]

    @property
    def ok(self) -> bool:
        """Whether autocast was at work, and the plan is about as precise as one device."""
        return all(1e-5 < a < 0.5 and b < 1.5 * a for a, b in zip(self.plain, self.plan, strict=True))


def closeness(net: str, plan: str, dtype: torch.dtype, size: int, device: str = "cpu", samples: int = 8) -> Closeness:
    """Run on every rank."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(samples, 3, size, size, generator=generator).to(device)
    labels = torch.randint(10, (samples,), generator=generator).to(device)
    want = _trained(net, None, None, images, labels)
    plain, under = (_trained(net, chosen, dtype, images, labels) for chosen in (None, plan))
    return Closeness(under[0].dtype, _errors(plain, want), _errors(under, want))


def _trained(net: str, plan: str | None, dtype: torch.dtype | None, images: Tensor, labels: Tensor) -> list[Tensor]:
    """Outputs, and all gradients in one vector."""
    model = build(net, images.shape[-1])[0].float().to(images.device)
    mine = slice(None)
    if plan:
        model = convoy.parallelize(model, plan, example=images)
        mine = convoy.local_samples(model, len(images))
    scale = 1024.0 if dtype == torch.float16 else 1.0
    with torch.autocast(images.device.type, dtype, enabled=dtype is not None):
        outputs = model(images[mine])
        loss = F.cross_entropy(outputs, labels[mine])
    (loss * scale).backward()
    gradients = convoy.gradients(model) if plan else {name: p.grad for name, p in model.named_parameters()}
    whole = outputs.new_zeros(len(images), outputs.shape[1])
    whole[mine] = outputs.detach()
    if plan:
        whole = _of_all_ranks(model, whole)
    return [whole, torch.cat([gradients[name].flatten() / scale for name in sorted(gradients)])]


def _of_all_ranks(net: nn.Module, own: Tensor) -> Tensor:
    """The outputs of all samples, of which each sample rank has its own and zeros."""
    group = network_of(net).groups.of(network_of(net).sample_axes)
    if group is None:
        return own
    summed = own.float().cpu()
    torch.distributed.all_reduce(summed, group=group)
    return summed.to(own)


def _errors(got: list[Tensor], want: list[Tensor]) -> list[float]:
    return [((a.float() - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True)]
