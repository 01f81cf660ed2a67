"""Mixup and CutMix: blends of two samples of a microbatch and of their labels."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from convoy.data.config import MixConfig


def mix(
    images: Tensor, labels: Tensor, *, num_classes: int, config: MixConfig, sizes: list[int], keys: list[int]
) -> tuple[Tensor, Tensor]:
    """Mix each sample with its partner: the one at the same place from the microbatch's end.

    mixup (Zhang et al., 2018): images and labels are λ of the one and 1 - λ of the other. CutMix (Yun et al., 2019):
    a rectangle of 1 - λ of the area comes from the partner, and λ is corrected where it is cut off at the border.
    λ has the distribution Beta(alpha, alpha). With both on, each microbatch gets one or the other.

    Args:
        images: float [samples, channels, height, width]; not changed.
        labels: int64 [samples].
        num_classes: length of the targets.
        config: the two alphas.
        sizes: samples of each microbatch, in order; they add up to the number of images.
        keys: a whole number for each microbatch, which alone decides its λ and rectangle.

    Returns:
        The mixed images, and targets [samples, classes] of the images' type whose rows add up to 1.
    """
    assert sum(sizes) == len(images) == len(labels) and len(sizes) == len(keys)
    targets = F.one_hot(labels, num_classes).to(images.dtype)
    if not config.on:
        return images, targets
    mixed = torch.empty_like(images)
    blended = torch.empty_like(targets)
    start = 0
    for size, key in zip(sizes, keys, strict=True):
        part = slice(start, start + size)
        mixed[part], blended[part] = _mix_one(images[part], targets[part], config, key)
        start += size
    return mixed, blended


def _mix_one(images: Tensor, targets: Tensor, config: MixConfig, key: int) -> tuple[Tensor, Tensor]:
    random = np.random.Generator(np.random.Philox(key & (2**64 - 1)))
    cut = config.cutmix > 0 and (config.mixup == 0 or random.random() < 0.5)
    alpha = config.cutmix if cut else config.mixup
    part = float(random.beta(alpha, alpha))
    partner = images.flip(0)
    if cut:
        height, width = images.shape[2:]
        half_height, half_width = (int(side * (1 - part) ** 0.5) // 2 for side in (height, width))
        row, column = int(random.integers(height)), int(random.integers(width))
        top, bottom = max(row - half_height, 0), min(row + half_height, height)
        left, right = max(column - half_width, 0), min(column + half_width, width)
        result = images.clone()
        result[:, :, top:bottom, left:right] = partner[:, :, top:bottom, left:right]
        part = 1 - (bottom - top) * (right - left) / (height * width)
    else:
        result = torch.lerp(partner, images, part)
    return result, torch.lerp(targets.flip(0), targets, part)
