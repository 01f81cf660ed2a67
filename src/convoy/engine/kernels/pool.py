"""A rank's part of pooling."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from convoy.engine.kernels import as_called
from convoy.engine.kernels.empty import nothing
from convoy.engine.kernels.kernel import Kernel, Site
from convoy.plans.rules.pool import windows_of
from convoy.plans.windows import Need, Window

MAX: Mapping[int, Callable[..., Tensor]] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVG: Mapping[int, Callable[..., Tensor]] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
ADAPTIVE: Mapping[int, Callable[..., Tensor]] = {
    1: F.adaptive_avg_pool1d,
    2: F.adaptive_avg_pool2d,
    3: F.adaptive_avg_pool3d,
}


def build_max(site: Site) -> Kernel:
    """The largest value of every window; outside the tensor there is none."""
    windows, attributes = _windows(site), site.call.attributes
    if not _divided(site, windows):
        return _guarded(site, as_called.build(site))
    pad, crop, padding = _fitted(site, windows)
    function, kernel, stride = MAX[len(windows)], attributes["kernel"], attributes["stride"]
    dilation = tuple(window.dilation for window in windows.values())

    def pool(x: Tensor) -> list[Tensor]:
        x = F.pad(x, pad, value=-math.inf) if any(pad) else x
        return [crop(function(x, kernel, stride, padding, dilation))]

    return _guarded(site, pool)


def build_avg(site: Site) -> Kernel:
    """The mean of every window, over as many elements as the whole call counts."""
    windows, attributes = _windows(site), site.call.attributes
    if not _divided(site, windows):
        return _guarded(site, as_called.build(site))
    pad, crop, padding = _fitted(site, windows)
    function, kernel, stride = AVG[len(windows)], attributes["kernel"], attributes["stride"]
    correct = _correction(site, windows)

    def pool(x: Tensor) -> list[Tensor]:
        x = F.pad(x, pad) if any(pad) else x
        return [correct(crop(function(x, kernel, stride, padding, count_include_pad=True)))]

    return _guarded(site, pool)


def build_adaptive(site: Site) -> Kernel:
    """On a rank's rows the windows are those of adaptive pooling again, to the rank's number of output rows.

    Where all rows are averaged, the rank's mean counts for the share of the rows that it has.
    """
    source, output = site.call.attributes["input"], site.call.outputs[0]
    shape, num_dims = site.local_shape(output), len(site.call.attributes["output_size"])
    size = shape[-num_dims:]
    layout = site.layouts[source]
    if not any(dim >= len(shape) - num_dims for dim, _ in layout.splits):
        return _guarded(site, as_called.build(site))
    if site.call.op == "adaptive_max_pool":
        return _guarded(site, _adaptive_max(site, size))
    whole = site.graph.shape(source)
    summed = [dim for dim, _ in layout.splits if site.layouts[output].split(dim) is None]
    rows = [len(site.parts(source, dim)) for dim in summed]
    share = math.prod(rows) / math.prod(whole[dim] for dim in summed)
    function = ADAPTIVE[num_dims]

    def pool(x: Tensor) -> list[Tensor]:
        if share == 0:
            return [x.new_zeros(shape) + x.sum()]
        y = function(x, size)
        return [y if share == 1 else y * share]

    return _guarded(site, pool)


def _adaptive_max(site: Site, size: Sequence[int]) -> Kernel:
    functions: dict[int, Callable[..., Any]] = {
        1: F.adaptive_max_pool1d,
        2: F.adaptive_max_pool2d,
        3: F.adaptive_max_pool3d,
    }
    function = functions[len(size)]
    return lambda x: [function(x, size)]


def _guarded(site: Site, kernel: Kernel) -> Kernel:
    """torch refuses to pool tensors without channels or rows."""
    shape = site.local_shape(site.call.outputs[0])
    if math.prod(shape):
        return kernel
    return lambda x: [nothing(x, shape)]


def _windows(site: Site) -> dict[int, Window]:
    return {dim: window for dim, window in windows_of(site.graph, site.call).items() if window is not None}


def _divided(site: Site, windows: Mapping[int, Window]) -> bool:
    return any(dim in windows for dim, _ in site.layouts[site.call.outputs[0]].splits)


def _output_rows(site: Site, dim: int) -> range:
    rows = site.parts(site.call.outputs[0], dim)
    assert isinstance(rows, range)
    return rows


def _fitted(
    site: Site, windows: Mapping[int, Window]
) -> tuple[tuple[int, ...], Callable[[Tensor], Tensor], tuple[int, ...]]:
    """What to pad before, how to crop after, and what padding to leave to torch, which pads both ends alike.

    Where more padding at the end only adds windows at the end, torch pads, for that spares a copy of the input.
    """
    pad: list[int] = []
    padding, crops = [], []
    for dim, window in windows.items():
        output = _output_rows(site, dim)
        need = window.needed(output)
        alike = _alike(window, need)
        padding.append(need.before if alike else 0)
        pad = [0, 0, *pad] if alike else [need.before, need.after, *pad]
        local = Window(len(need.rows), window.kernel, window.stride, window.dilation, need.before, need.before)
        if alike and local.output_size > len(output):
            crops.append((dim, len(output)))

    def crop(y: Tensor) -> Tensor:
        for dim, length in crops:
            y = y.narrow(dim, 0, length)
        return y

    return tuple(pad), crop, tuple(padding)


def _alike(window: Window, need: Need) -> bool:
    return need.after <= need.before <= window.kernel // 2 and len(need.rows) > 0


def _correction(site: Site, windows: Mapping[int, Window]) -> Callable[[Tensor], Tensor]:
    """From means over full windows to means over as many elements as the whole call counts."""
    attributes = site.call.attributes
    volume, override = math.prod(attributes["kernel"]), attributes.get("divisor_override")
    if override:
        return lambda y: y * (volume / override)
    num_dims = len(site.graph.shape(site.call.outputs[0]))
    factors = []
    for dim, window in windows.items():
        counts = window.counts(_output_rows(site, dim), attributes["count_include_pad"])
        if any(count != window.kernel for count in counts):
            shape = [-1 if other == dim else 1 for other in range(num_dims)]
            ratios = [window.kernel / count for count in counts]
            factors.append(torch.tensor(ratios, dtype=torch.float64).reshape(shape))
    if not factors:
        return lambda y: y
    ready: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}

    def correct(y: Tensor) -> Tensor:
        dtype = torch.float64 if y.dtype == torch.float64 else torch.float32
        kind = (dtype, y.device)
        if kind not in ready:
            ready[kind] = [factor.to(*kind[::-1]) for factor in factors]
        z = y
        for factor in ready[kind]:
            z = z * factor
        return z.to(y.dtype)

    return correct
