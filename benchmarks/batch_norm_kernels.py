"""Convoy's batch norm kernels on a GPU: whether they are right, and what they take beside torch's.

    python benchmarks/batch_norm_kernels.py                     some 40 seconds; status 1 where a kernel is wrong
    python benchmarks/batch_norm_kernels.py --few               two shapes instead of six, channels innermost
    python benchmarks/batch_norm_kernels.py --check             measures nothing
    TRITON_INTERPRET=1 python benchmarks/batch_norm_kernels.py --device cpu    tries the program, small, interpreted

Results, gradients and running statistics are compared with torch's in float64 on the CPU: in float64 to rounding, in
lower precision they may be no farther away than torch's own. Runs are repeated for their bits. Times are of a layer
forward and backward: of its kernels on the GPU, by the profiler, and of the host to issue it.
"""

import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measuring import harness, machine
from measuring.dispatch import fake_ranks
from torch import Tensor

from convoy.ops import gpu, microbatch_norm, shared_batch_norm
from convoy.ops.microbatch_norm import Branch, Holders, batch_norm_kernels, normalize_at_once
from convoy.ops.shared_batch_norm import normalize_both, normalize_together
from convoy.ops.statistics import Following

SHAPES = ((32, 64, 56, 56), (16, 256, 14, 14), (8, 2048, 7, 7), (6, 24, 5, 3), (64, 64), (9, 70, 300))
SMALL = ((6, 24, 5, 3), (64, 8))
LAYERS = ((64, 112), (64, 56), (256, 56), (512, 28), (1024, 14), (2048, 7))
"""Channels and size of typical layers of ResNet-50."""
BATCHES = (256, 32)
REPEATS = 5
EPS = 1e-5


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
        if self.parts == 1:
            return (self.shape[0],)
        size = self.shape[0] // self.parts
        return (*(size,) * (self.parts - 1), self.shape[0] - size * (self.parts - 1))


Result = list[Tensor]


def own(case: Case, device: str) -> Result:
    x, residual, gradient, weight, bias = case.tensors(device)
    leaves = [t.requires_grad_() for t in (x, weight, bias, residual)]
    mean, var = torch.zeros_like(bias), torch.ones_like(bias)
    running = Following(mean, var, 0.1)
    y, _ = normalize_at_once(x, weight, bias, EPS, case.sizes, running, case.relu, residual if case.residual else None)
    y.backward(gradient)
    return [y.detach(), *(t.grad for t in leaves if t.grad is not None), mean, var]


def by_torch(case: Case, device: str, dtype: torch.dtype | None = None) -> Result:
    """The same by torch's operations, each microbatch by itself."""
    x, residual, gradient, weight, bias = case.tensors(device)
    if dtype is not None:
        x, residual, gradient, weight, bias = (t.to(dtype) for t in (x, residual, gradient, weight, bias))
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias, residual)]
    x, weight, bias, residual = leaves
    mean, var = torch.zeros_like(bias.detach()), torch.ones_like(bias.detach())
    y = torch.cat([F.batch_norm(part, mean, var, weight, bias, True, 0.1, EPS) for part in x.split(case.sizes)])
    y = y + residual if case.residual else y
    y = y.relu() if case.relu else y
    y.backward(gradient)
    return [y.detach(), *(t.grad for t in leaves if t.grad is not None), mean, var]


def away(found: Result, exact: Result) -> float:
    """The largest relative distance of a tensor, by the root of the sum of squares."""
    pairs = zip(found, exact, strict=True)
    return max(float((a.double().cpu() - b).norm() / b.norm().clamp(min=1e-12)) for a, b in pairs)


def check(device: str, few: bool) -> list[str]:
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
        exact, first = by_torch(case, "cpu", torch.float64), own(case, device)
        distance = away(first, exact)
        allowed = 1e-11 if dtype == torch.float64 else 1.1 * away(by_torch(case, device), exact) + 1e-6
        before = worst.get(dtype, (0.0, 0.0))
        worst[dtype] = max(before[0], distance), max(before[1], allowed)
        if not distance <= allowed:
            wrong.append(f"{case}: {distance:.1e} away from float64, more than {allowed:.1e}")
        for _ in range(REPEATS if device == "cuda" else 1):
            if not all(map(torch.equal, own(case, device), first)):
                wrong.append(f"{case}: other bits in another run")
                break
    for dtype, (distance, allowed) in worst.items():
        print(f"{dtype}: {distance:.1e} away from float64 at most (allowed: {allowed:.1e})", flush=True)
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


@contextmanager
def interpreted() -> Iterator[None]:
    """Let the CPU do as a GPU does."""
    from convoy.ops import microbatch_kernels

    with mock.patch.object(microbatch_norm, "batch_norm_kernels", lambda x: microbatch_kernels):
        yield


def times() -> None:
    """Of layers forward and backward, with a ReLU, and with an addition before it."""
    print("| layer | ends | own GPU µs | torch GPU µs | own GB/s | own host µs | torch host µs | own kernels, µs |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    total = [0.0, 0.0]
    for (channels, size), batch, residual in itertools.product(LAYERS, BATCHES, (False, True)):
        case = Case((batch, channels, size, size), torch.bfloat16, True, 1, residual, True)
        x, other, gradient, weight, bias = case.tensors("cuda")
        for tensor in (x, other, weight, bias):
            tensor.requires_grad_()
        mean, var = torch.zeros_like(bias.detach()), torch.ones_like(bias.detach())
        running, added = Following(mean, var, 0.1), other if residual else None
        inputs = [x, weight, bias, *([other] if residual else [])]

        def of_convoy() -> None:
            y, _ = normalize_at_once(x, weight, bias, EPS, case.sizes, running, True, added)  # noqa: B023
            torch.autograd.grad(y, inputs, gradient)  # noqa: B023

        def of_torch() -> None:
            y = F.batch_norm(x, mean, var, weight, bias, True, 0.1, EPS)  # noqa: B023
            y = y.add_(other) if residual else y  # noqa: B023
            torch.autograd.grad(y.relu_(), inputs, gradient)  # noqa: B023

        sides = [measure(run) for run in (of_convoy, of_torch)]
        (own_gpu, own_host, kernels), (torch_gpu, torch_host, _) = sides
        total = [total[0] + own_gpu, total[1] + torch_gpu]
        # forward x twice, y and the residual; backward dy, x and what is behind the ReLU twice, dx, y
        moved = x.numel() * 2 * (4 + 7 if residual else 3 + 5) / own_gpu / 1e3
        cells = [f"{batch} x {channels} x {size}²", "add, ReLU" if residual else "ReLU", f"{own_gpu:.0f}"]
        cells += [f"{torch_gpu:.0f}", f"{moved:.0f}", f"{own_host:.0f}", f"{torch_host:.0f}", kernels]
        print(f"| {' | '.join(cells)} |", flush=True)
    print(f"all: {total[0]:.0f} µs, torch's {total[1]:.0f} µs")


def measure(run: Callable[[], None], number: int = 10) -> tuple[float, float, str]:
    """Microseconds of the GPU and of the host; and of each kernel."""
    for _ in range(3):
        run()
    host = []
    for _ in range(3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(number):
            run()
        host.append((time.perf_counter() - began) / number * 1e6)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(number):
            run()
        torch.cuda.synchronize()
    found = {event.key: event.self_device_time_total / number for event in profile.key_averages()}
    kernels = ", ".join(f"{name.strip('_')} {spent:.0f}" for name, spent in found.items() if name.startswith("_"))
    return sum(found.values()), min(host), kernels


def main(arguments: Sequence[str] | None = None) -> None:
    """Check, then measure."""
    parser = harness.parser(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--few", action="store_true", help="fewer shapes")
    parser.add_argument("--check", action="store_true", help="measure nothing")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch sees no CUDA device here: --device cpu tries the program with TRITON_INTERPRET=1")
    print(machine.sentence(machine.describe()), flush=True)
    if options.device == "cpu":
        with interpreted():
            wrong = check("cpu", options.few)
    else:
        if batch_norm_kernels(torch.zeros(1, device="cuda")) is None:
            sys.exit("Triton's kernels do not run here")
        wrong = check("cuda", options.few)
        if not options.check:
            times()
    for what in wrong:
        print(f"wrong: {what}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
