"""Under autocast a plan is as precise as one device, also where ranks have no samples."""

import pytest
import torch
import torch.nn.functional as F
from exactness import build
from torch import Tensor

import convoy
from convoy.engine.network import network_of
from ranks import run_ranks


def is_close(net: str, plan: str, dtype: torch.dtype, size: int, device: str = "cpu", samples: int = 8) -> str:
    """Empty where outputs and gradients under a plan are about as precise as on one device, both under autocast, and
    autocast was at work; else their errors. Run on every rank."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(samples, 3, size, size, generator=generator).to(device)
    labels = torch.randint(10, (samples,), generator=generator).to(device)
    want, plain, under = (
        _trained(net, chosen, kind, images, labels) for chosen, kind in ((None, None), (None, dtype), (plan, dtype))
    )
    errors = [
        [((a.float() - b).norm() / b.norm()).item() for a, b in zip(x, want, strict=True)] for x in (plain, under)
    ]
    good = under[0].dtype == dtype and all(1e-5 < a < 0.5 and b < 1.5 * a for a, b in zip(*errors, strict=True))
    return "" if good else f"{under[0].dtype}: {errors}"


def _trained(net: str, plan: str | None, dtype: torch.dtype | None, images: Tensor, labels: Tensor) -> list[Tensor]:
    """Outputs of all samples, and all gradients in one vector."""
    model = build(net, images.shape[-1])[0].float().to(images.device)
    model = convoy.parallelize(model, plan, example=images) if plan else model
    mine = convoy.local_samples(model, len(images)) if plan else slice(None)
    scale = 1024.0 if dtype == torch.float16 else 1.0
    with torch.autocast(images.device.type, dtype, enabled=dtype is not None):
        outputs = model(images[mine])
        loss = F.cross_entropy(outputs, labels[mine])
    (loss * scale).backward()
    gradients = convoy.gradients(model) if plan else {name: p.grad for name, p in model.named_parameters()}
    whole = outputs.new_zeros(len(images), outputs.shape[1])
    whole[mine] = outputs.detach()
    if plan and (group := network_of(model).groups.of(network_of(model).sample_axes)) is not None:
        summed = whole.float().cpu()
        torch.distributed.all_reduce(summed, group=group)
        whole = summed.to(whole)
    return [whole, torch.cat([gradients[name].flatten() / scale for name in sorted(gradients)])]


@pytest.mark.parametrize(
    ("net", "plan", "samples"),
    [("squeeze-excite", "height=2", 8), ("permuted", "channel=2", 8), ("squeeze-excite", "sample=3", 2)],
)
def test_low_precision_under_a_plan(net: str, plan: str, samples: int) -> None:
    assert not any(run_ranks(is_close, int(plan[-1]), net, plan, torch.bfloat16, 16, "cpu", samples))
