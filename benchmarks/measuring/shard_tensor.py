"""PhysicsNeMo's ShardTensor on CPUs: `pip install nvidia-physicsnemo` and what it asks for, on the path.

Version 2.2.2 registers its operations only where there is a GPU, and hands torch a device that torch takes for GPUs
alone. Both are undone here. torchvision, which it imports, does not import beside torch's CPU build unless its
operators are known; none of them runs.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_OPERATORS = (
    *("nms", "qnms", "roi_align", "_roi_align_backward", "ps_roi_align", "_ps_roi_align_backward"),
    *("roi_pool", "_roi_pool_backward", "ps_roi_pool", "_ps_roi_pool_backward"),
    *("deform_conv2d", "_deform_conv2d_backward"),
)
_kept: list[Any] = []


def scattered(x: Tensor, dim: int) -> Any:
    """A tensor that every rank has as a ShardTensor, divided over all ranks along a dim."""
    domain_parallel = _library()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return domain_parallel.scatter_tensor(x, 0, mesh, (Shard(dim),))


def _library() -> Any:
    if not _kept:
        library = torch.library.Library("torchvision", "DEF")
        for name in _OPERATORS:
            library.define(f"{name}(Tensor input) -> Tensor")
        _kept.append(library)
    import physicsnemo.domain_parallel  # type: ignore[import-not-found]
    from physicsnemo.distributed import DistributedManager  # type: ignore[import-not-found]

    if not DistributedManager.is_initialized():
        physicsnemo.domain_parallel.register_custom_ops()
        manager = DistributedManager._shared_state
        manager.update(
            _rank=dist.get_rank(),
            _world_size=dist.get_world_size(),
            _local_rank=dist.get_rank(),
            _distributed=True,
            _device=torch.device("cpu"),
            _is_initialized=True,
        )
    return physicsnemo.domain_parallel
