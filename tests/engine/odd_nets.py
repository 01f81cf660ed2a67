"""Networks that do one odd thing each: couple samples, call what has no rule, overwrite, hide, wrap, return more."""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Work = Callable[["Layers", Tensor], Any]


class Layers(nn.Module):
    """Some layers, and what `forward` does with them."""

    def __init__(self, work: Work, bias: tuple[int, ...] = (1,)) -> None:
        super().__init__()
        self.conv, self.norm, self.other = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(3, 4, 3)
        self.last = nn.Conv2d(4, 10, 3)
        self.scale, self.bias = nn.Parameter(torch.ones(4)), nn.Parameter(torch.randn(bias))
        self.drop, self.fc = nn.Dropout(0.3), nn.Linear(4, 10)
        self.work = work

    def forward(self, x: Tensor) -> Any:
        return self.work(self, x)


def _without_first(x: Tensor) -> Tensor:
    x = x.clone()
    x[0] = 0
    return x


COUPLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x - x.mean(0),
    "flip": lambda x: x + x.flip(0),
    "size": lambda x: x * x.shape[0],
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "einsum": lambda x: x + 0.1 * torch.einsum("bi,bj,cj->ci", x, x, x),
}
UNSEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x - x.mean(0) if x.isfinite().all() else x,
    "choice": lambda x: x * 2 if float(x.detach().mean()) > 0.1 else x,
    "draw": lambda x: F.dropout(x, 0.3, x.requires_grad) if x.isfinite().all() else x,
    "gradient": lambda x: x * 2 if x.requires_grad else x * 3,
    "part": _without_first,
    "in place": lambda x: x.mul_(2) if x.isfinite().all() else x,
}
"""Those that cannot be captured."""
UNCAPTURED = ("unseen", "spectral")
"""How the names of networks begin that cannot be captured."""


def coupled(couple: Callable[[Tensor], Tensor], gives: str = "") -> Callable[[], nn.Module]:
    """A network that couples the samples of a batch, and returns something beside what belongs to samples."""

    def work(net: Layers, x: Tensor) -> Any:
        x = F.relu(net.norm(F.relu(net.conv(x.mul_(1)), inplace=True)), inplace=True)
        x = couple(x.mean((2, 3)) * net.scale)
        logits = net.fc(net.drop(x))
        if gives == "scalar":
            return logits, (x * x).sum() * net.scale.sum()
        if gives == "vector":
            return {"logits": logits, "mean": x.mean(0), "seen": (x > 0).sum(0)}
        return (logits, net.fc.weight.sum(0)) if gives == "weight" else logits

    return lambda: Layers(work)


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "normalize": lambda x: F.normalize(x, dim=1),
    "flip": lambda x: x.flip(3, 2),
    "sort": lambda x: torch.sort(x, axis=1)[0],
    "cumsum": lambda x: x.cumsum(2),
    "topk": lambda x: x.topk(2, dim=2)[0],
    "patches": lambda x: F.fold(F.unfold(x, 3), (6, 6), 3),
    "attention": lambda x: F.scaled_dot_product_attention(x, x * 2, x + 1),
}
"""Calls without a rule of their own, which mix some dimensions and not others."""
BIASED = {"a bias": (1, 4, 6, 6), "one bias": (6, 6)}
"""Attention with a parameter of some shape as its mask."""


def between(kind: str) -> Callable[[], nn.Module]:
    """One of CALLS or BIASED between two convolutions."""

    def work(net: Layers, x: Tensor) -> Tensor:
        x = net.conv(x)
        biased = kind in BIASED
        x = F.scaled_dot_product_attention(x, x * 2, x + 1, attn_mask=net.bias * 2) if biased else CALLS[kind](x)
        return net.last(F.pad(x, (0, 0, 0, 3))).mean((2, 3))

    return lambda: Layers(work, BIASED.get(kind, (1,)))


def read_twice(net: Layers, x: Tensor) -> Tensor:
    y = net.conv(x)
    return F.relu(y) + y.exp()


def relu_of_a_view(net: Layers, x: Tensor) -> Tensor:
    y = net.conv(x)
    return y.flatten(2).relu() + y.flatten(2).exp()


OVERWRITING: dict[str, Work] = {
    "relu of norm": lambda net, x: F.relu(net.norm(net.conv(x)), inplace=True),
    "relu of sum": lambda net, x: F.relu(net.norm(net.conv(x)) + net.other(x)),
    "relu of joined": lambda net, x: torch.cat([net.conv(x), net.other(x)], 1).relu(),
    "sum with a vector": lambda net, x: net.conv(x).mean((2, 3), keepdim=True) + net.other(x),
    "relu of relu": lambda net, x: F.relu(F.relu(net.conv(x))),  # of the inner one's output comes its gradient
    "read twice": read_twice,
    "relu of a view": relu_of_a_view,
    "relu of the images": lambda net, x: net.conv(F.relu(x)),
}
"""What may be overwritten, and what must not be."""


def _twice(net: Layers, x: Tensor) -> Tensor:
    once, flipped = net.last(net.norm(net.conv(torch.cat([x, x.flip(3)])))).mean((2, 3)).chunk(2)
    return once + 2 * flipped


JOINED: dict[str, Work] = {
    "twice": _twice,
    "first four": lambda net, x: net.last(net.conv(x)).mean((2, 3)) + net.last(net.norm(net.conv(x[:4]))).mean(),
    "one by one": lambda net, x: torch.cat([net.fc(net.conv(one).mean((2, 3))) for one in x.split(1)]),
}
"""Other samples than those of the batch, or other numbers of them."""


def _between_heads(net: Layers, x: Tensor) -> tuple[Tensor, Tensor]:
    x = net.conv(F.avg_pool2d(x, 2)).mean((2, 3))
    return net.last(x.relu()[..., None, None].expand(-1, -1, 3, 3)).flatten(1), net.fc(x)


def _training_heads(net: Layers, x: Tensor) -> Any:
    x = net.conv(x)
    first = net.last(x).mean((2, 3))
    return (first, net.fc(x.mean((2, 3)))) if net.training else first


def base(norm: Callable[[], nn.Module] = nn.Identity) -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), norm(), nn.LeakyReLU(0.1))
    return nn.Sequential(first, nn.Conv2d(6, 6, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(6 * 64, 10))


class ByHand(nn.Module):
    """Batch norm by the batch's own statistics, in evaluation too, called by the network itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = base()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(F.batch_norm(x, None, None, training=True))
        return F.batch_norm(y, None, None, training=True)


class OfTorch(nn.BatchNorm2d):
    """Norms by functions of `torch`, whose arguments come in another order than those of `torch.nn.functional`."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_batches_tracked.add_(1)
        shared = self.weight * 2, self.bias, self.running_mean, self.running_var
        x = torch.batch_norm(x, *shared, self.training, 0.1, 1e-5, False)
        return torch.instance_norm(x, self.weight, self.bias - 1, None, None, True, 0.1, 1e-5, cudnn_enabled=False)


def weighed(*norms: Callable[..., nn.Module]) -> nn.Module:
    net = base()
    for layer, norm in zip((net[0][0], net[1]), norms, strict=False):
        norm(layer)
    return net


def _doubled(self: nn.Sequential, x: Tensor) -> Tensor:
    return nn.Sequential.forward(self, self.twos * x)


def _with_forward() -> nn.Module:
    net = base()
    net.register_buffer("twos", torch.full((1,), 2.0, dtype=torch.float64).expand(8))
    net.forward = MethodType(_doubled, net)
    return net


def _shared() -> nn.Module:
    """A layer that is called twice, and one with a single channel."""
    first, again, *_ = base()
    return nn.Sequential(first, again, nn.Tanh(), again, nn.Conv2d(6, 1, 1), nn.Flatten(), nn.Linear(64, 10))


SPECTRAL, WEIGHT = nn.utils.spectral_norm, nn.utils.weight_norm
"""The old ones, which compute weights in hooks."""
GIVEN: dict[str, Callable[[], nn.Module]] = {
    "no running statistics": lambda: base(lambda: nn.BatchNorm2d(6, track_running_stats=False)),
    "by hand": ByHand,
    "of torch": lambda: base(lambda: OfTorch(6)),
    "momentum none": lambda: base(lambda: nn.BatchNorm2d(6, momentum=None)),
    "instance norm that tracks": lambda: base(lambda: nn.InstanceNorm2d(6, affine=True, track_running_stats=True)),
    "weight": lambda: weighed(WEIGHT, WEIGHT),
    "own forward": _with_forward,
    "spectral beside weight": lambda: weighed(SPECTRAL, WEIGHT),
    "shared": _shared,
    "data parallel": lambda: nn.DataParallel(base()),
}
STAGED = tuple(kind for kind in GIVEN if kind not in ("of torch", "spectral beside weight", "data parallel"))
"""Those of GIVEN that can be cut into stages."""


class Branches(nn.Module):
    """A skip connection over two cuts, two outputs, one of which an early stage gives, batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Linear(6, 10)
        self.down = nn.Sequential(nn.Conv2d(6, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.deep = nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1), nn.ReLU(inplace=True), nn.Dropout(0.3))
        self.up, self.last = nn.ConvTranspose2d(8, 6, 2, 2), nn.Conv2d(12, 10, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x)
        early = self.head(x.mean((2, 3)))
        y = self.up(self.deep(self.down(x)))
        return self.last(torch.cat((y + x, x), 1)).mean((2, 3)), early


def wide() -> nn.Sequential:
    """Weights large enough for messages of their own."""
    layers = [nn.Linear(192, 512), nn.ReLU(), nn.Linear(512, 512), nn.Linear(512, 10)]
    return nn.Sequential(nn.Flatten(), *layers)


def chain() -> nn.Sequential:
    layers = (nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU()) for _ in range(4))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(192, 10))


ODD_NETS: dict[str, Callable[[], nn.Module]] = {
    **{f"coupled by {kind}": coupled(couple) for kind, couple in COUPLINGS.items()},
    **{f"unseen {kind}": coupled(couple) for kind, couple in UNSEEN.items()},
    **{f"coupled, gives {gives}": coupled(COUPLINGS["mean"], gives) for gives in ("scalar", "vector")},
    **{f"unseen, gives {gives}": coupled(UNSEEN["choice"], gives) for gives in ("scalar", "vector")},
    "gives weight": coupled(lambda x: x, "weight"),
    **{f"calls {kind}": between(kind) for kind in (*CALLS, *BIASED)},
    **{kind: (lambda work=work: Layers(work)) for kind, work in (OVERWRITING | JOINED).items()},
    **GIVEN,
    "branches": Branches,
    "wide": wide,
    "chain": chain,
    "two heads": lambda: Layers(_between_heads),
    "training heads": lambda: Layers(_training_heads),
}
"""Networks for pictures of 8 by 8 pixels and 10 classes."""
