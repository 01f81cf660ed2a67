"""Messages of gradients in memory: flat copies of small ones, and views of large ones."""

import torch
from torch import Tensor

from convoy.plans.buckets import Bucket, Item, Sizes, plan_buckets

__all__ = ["Bucket", "Item", "Sizes", "copy_all", "flat", "is_dense", "laid_out", "plan_buckets", "shaped"]


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements lie without gap or overlap in memory, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def flat(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor in the order of memory, without a copy."""
    return tensor.as_strided((tensor.numel(),), (1,))


def shaped(elements: Tensor, like: Tensor) -> Tensor:
    """Flat elements in the shape and the order of dimensions of another tensor, without a copy."""
    stride = like.stride() if is_dense(like) else torch.empty(like.shape, device="meta").stride()
    return elements.as_strided(like.shape, stride, elements.storage_offset())


def laid_out(gradient: Tensor, like: Tensor) -> Tensor:
    """The gradient with its elements in memory as `shaped` expects them: itself, as autograd gives it, or a copy."""
    if gradient.stride() == like.stride() and is_dense(like):
        return gradient
    wanted = shaped(torch.empty(like.numel(), dtype=gradient.dtype, device=gradient.device), like)
    return gradient if gradient.stride() == wanted.stride() else wanted.copy_(gradient)


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy many small tensors."""
    if targets:
        torch._foreach_copy_(targets, sources)
