"""What a rank of the CUDA suite does: several of them share one GPU and speak over gloo."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from exactness import Distance, distance
from low_precision import Closeness, closeness
from torch import Tensor, nn

import convoy
from convoy.ops.random_bits import layer_key, random_bits, sample_keys

DEVICE = os.environ.get("CONVOY_TEST_DEVICE", "cuda:0")
"""`cpu` runs the suite where there is no GPU, to try the suite itself."""


@contextlib.contextmanager
def steady() -> Iterator[None]:
    """Kernels that give the same bits every time, and float32 that is float32."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    yield
    if DEVICE != "cpu":
        torch.cuda.empty_cache()  # the ranks' processes live on, and share the memory


def exact(net: str, plan: Any, options: dict[str, Any]) -> Distance:
    """How far training under the plan is from training on one device, on the same GPU."""
    with steady():
        return distance(net, plan, device=DEVICE, **options)


class Dropping(nn.Module):
    """Drops elements, channels and elements of a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.channels = nn.Dropout2d(0.4)
        self.pixels = nn.Dropout(0.3)
        self.hidden = nn.Linear(8 * 16, 24)
        self.units = nn.Dropout(0.5)
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pixels(self.channels(F.relu(self.conv(x))))
        return self.head(self.units(F.relu(self.hidden(F.max_pool2d(x, 4).flatten(1)))))


def dropped(plan: str, device: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of this rank's part and whole gradients of a network with dropout, in float64, on the CPU."""
    with steady():
        torch.manual_seed(0)
        model = Dropping().double().to(device)
        images = torch.randn(6, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(device)
        net = convoy.parallelize(model, plan, example=images, seed=7)
        mine = convoy.local_samples(net, len(images))
        loss = F.cross_entropy(net(images[mine]), torch.arange(6, device=device)[mine])
        loss.backward()
        return loss.detach().cpu(), {name: gradient.cpu() for name, gradient in convoy.gradients(net).items()}


def bits(device: str) -> Tensor:
    """Random numbers of some samples, on the CPU."""
    return random_bits(sample_keys(5, 3, range(2, 40)).to(device), layer_key("features.1"), 5000).cpu()


def low_precision(net: str, plan: str, dtype: torch.dtype, size: int) -> Closeness:
    """`low_precision.closeness` on the GPU."""
    with steady():
        return closeness(net, plan, dtype, size, DEVICE)
