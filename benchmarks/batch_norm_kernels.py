"""Whether Convoy's batch norm kernels are right on a GPU.

    python benchmarks/batch_norm_kernels.py                     some 40 seconds; status 1 where a kernel is wrong
    python benchmarks/batch_norm_kernels.py --few               two shapes instead of six, channels innermost
    TRITON_INTERPRET=1 python benchmarks/batch_norm_kernels.py --device cpu    tries the program, small, interpreted

Results, gradients and running statistics are compared with torch's in float64 on the CPU: in float64 to rounding, in
lower precision they may be no farther away than torch's own. Runs are repeated for their bits.
"""

import itertools
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measuring import harness
from measuring.dispatch import fake_ranks
from torch import Tensor

from convoy.ops import gpu, microbatch_norm, shared_batch_norm
from convoy.ops.microbatch_norm import batch_norm_kernels, normalize_at_once
from convoy.ops.shared_batch_norm import Branch, Holders, normalize_both, normalize_together
from convoy.ops.statistics import Following

SHAPES = ((32, 64, 56, 56), (16, 256, 14, 14), (8, 2048, 7, 7), (6, 24, 5, 3), (64, 64), (9, 70, 300))
SMALL = ((6, 24, 5, 3), (64, 8))
REPEATS = 5
EPS = 1e-5
Result = list[Tensor]


@dataclass(frozen=True)
class Case:
    """What a layer is given."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    last: bool
    parts: int
    residual: bool
    relu: bool

    def tensors(self, device: str) -> list[Tensor]:
        """The activation, what is added, the gradient; weight and bias."""
        torch.manual_seed(0)
        x, residual, gradient = (
            torch.randn(self.shape).mul(scale).add(shift).to(self.dtype) for scale, shift in ((3, 2), (1, 0), (1, 0))
        )
        wide = torch.promote_types(self.dtype, torch.float32)
        form = torch.channels_last if self.last and x.dim() == 4 else torch.contiguous_format
        moved = [t.to(device).to(memory_format=form) for t in (x, residual, gradient)]
        return [*moved, *(torch.randn(self.shape[1]).to(device, wide) for _ in range(2))]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of the microbatches, which are uneven if there are several."""
        size = self.shape[0] // self.parts
        return (*(size,) * (self.parts - 1), self.shape[0] - size * (self.parts - 1))


def layer(case: Case, device: str, dtype: torch.dtype | None = None, own: bool = False) -> Result:
    """By Convoy's kernels, or by torch's operations, each microbatch by itself."""
    tensors = case.tensors(device) if dtype is None else [t.to(dtype) for t in case.tensors(device)]
    x, residual, gradient, weight, bias = tensors
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias, residual)]
    x, weight, bias, residual = leaves
    mean, var = torch.zeros_like(bias.detach()), torch.ones_like(bias.detach())
    if own:
        more = residual if case.residual else None
        running = Following(mean, var, 0.1)
        y, _ = normalize_at_once(x, weight, bias, EPS, case.sizes, running, case.relu, more)
    else:
        y = torch.cat([F.batch_norm(part, mean, var, weight, bias, True, 0.1, EPS) for part in x.split(case.sizes)])
        y = y + residual if case.residual else y
        y = y.relu() if case.relu else y
    y.backward(gradient)
    return [y.detach(), *(t.grad for t in leaves if t.grad is not None), mean, var]


def away(found: Result, exact: Result) -> float:
    """The largest relative distance of a tensor, by the root of the sum of squares."""
    pairs = zip(found, exact, strict=True)
    return max(float((a.double().cpu() - b).norm() / b.norm().clamp(min=1e-12)) for a, b in pairs)


def check(report: harness.Report, device: str, few: bool) -> list[str]:
    """What is wrong."""
    wrong: list[str] = []
    shapes: Sequence[tuple[int, ...]] = SHAPES if device == "cuda" else SMALL
    kinds = (torch.float32, torch.float64) if device == "cpu" else (torch.bfloat16, torch.float32, torch.float64)
    shapes, orders, numbers = ([*shapes[1:2], *shapes[4:5]], (True,), (1,)) if few else (shapes, (True, False), (1, 3))
    worst: dict[torch.dtype, tuple[float, float]] = {}
    for shape, dtype, last, parts, residual, relu in itertools.product(
        shapes, kinds, orders, numbers, (False, True), (False, True)
    ):
        if not last and len(shape) != 4:
            continue
        case = Case(shape, dtype, last, parts, residual, relu)
        exact, first = layer(case, "cpu", torch.float64), layer(case, device, own=True)
        distance = away(first, exact)
        allowed = 1e-11 if dtype == torch.float64 else 1.1 * away(layer(case, device), exact) + 1e-6
        before = worst.get(dtype, (0.0, 0.0))
        worst[dtype] = max(before[0], distance), max(before[1], allowed)
        if not distance <= allowed:
            wrong.append(f"{case}: {distance:.1e} away from float64, more than {allowed:.1e}")
        for _ in range(REPEATS if device == "cuda" else 1):
            if not all(map(torch.equal, layer(case, device, own=True), first)):
                wrong.append(f"{case}: other bits in another run")
                break
    report.header("", "farthest from float64", "allowed")
    for dtype, distances in worst.items():
        report.row(dtype, *(f"{distance:.1e}" for distance in distances))
    wrong += shared(device)
    if any(counter.any() for counter in gpu._counters.values()):
        wrong.append("counters are not as they were")
    return wrong


def shared(device: str) -> list[str]:
    """Over two ranks and over many, of which the others have the same: as on one."""
    wrong = []
    for ranks in (2, 100):
        with fake_ranks(ranks), mock.patch.object(shared_batch_norm, "at_once", lambda x: True):
            case = Case(SMALL[0], torch.float64, True, 1, True, True)
            x, other, _, weight, bias = case.tensors(device)
            numbers = x.numel() // x.shape[1]
            holders = Holders(dist.group.WORLD, (numbers,) * ranks)  # type: ignore[arg-type]
            alone = F.batch_norm(x, None, None, weight, bias, True, 0.1, EPS)
            y = normalize_together(x, weight, bias, None, EPS, holders, True, other)
            if away([y], [(alone + other).relu().cpu()]) > 1e-12:
                wrong.append(f"a layer over {ranks} ranks")
            both = [Branch(t, weight, bias, None, EPS) for t in (x, other)]
            y = normalize_both(both[0], both[1], holders, True)
            alone = alone + F.batch_norm(other, None, None, weight, bias, True, 0.1, EPS)
            if away([y], [alone.relu().cpu()]) > 1e-12:
                wrong.append(f"two layers over {ranks} ranks")
    return wrong


def main() -> None:
    """Check."""
    parser = harness.parser(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--few", action="store_true", help="fewer shapes")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch sees no CUDA device here: --device cpu tries the program with TRITON_INTERPRET=1")
    if options.device == "cuda" and batch_norm_kernels(torch.zeros(1, device="cuda")) is None:
        sys.exit("Triton's kernels do not run here")
    with harness.report(options.out) as report, ExitStack() as stack:
        if options.device == "cpu":  # which is to do as a GPU does
            from convoy.ops import microbatch_kernels

            for module in (microbatch_norm, shared_batch_norm):
                stack.enter_context(mock.patch.object(module, "batch_norm_kernels", lambda x: microbatch_kernels))
        wrong = check(report, options.device, options.few)
        for what in wrong:
            report.print(f"wrong: {what}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
