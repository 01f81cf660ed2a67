"""What becomes of a picture's pixels: the part that is cut out, its colors, mixtures, the numbers a network gets."""

import pytest
import torch
from torch import Tensor

from convoy.data.config import MixConfig
from convoy.data.transforms import mix

LABELS = torch.tensor([0, 1, 2, 3, 4, 0])


def images() -> Tensor:
    """Picture i is i everywhere, so that a mixture shows its parts."""
    return torch.arange(6.0).view(6, 1, 1, 1).expand(6, 3, 16, 16).clone()


def mixed(sizes: list[int], keys: list[int], **config: float) -> tuple[Tensor, Tensor]:
    return mix(images(), LABELS, num_classes=5, config=MixConfig(**config), sizes=sizes, keys=keys)


def test_mixup_blends_with_the_reversed_microbatch() -> None:
    plain, targets = mixed([6], [0])
    assert torch.equal(plain, images()) and torch.equal(targets.argmax(1), LABELS) and targets.sum() == 6
    result, targets = mixed([4, 2], [3, 2**64 - 1], mixup=1.0)
    first, second = float(targets[0, 0]), float(targets[4, 4])
    assert 0 < first < 1 and first != second
    for sample, value in ((0, (1 - first) * 3), (3, first * 3), (4, second * 4 + (1 - second) * 5)):
        torch.testing.assert_close(result[sample], torch.full((3, 16, 16), value))
    torch.testing.assert_close(targets.sum(1), torch.ones(6))


def test_cutmix_labels_have_the_area_of_the_rectangle_and_a_microbatch_depends_on_its_key_alone() -> None:
    for key in range(30):
        result, targets = mixed([6], [key], cutmix=1.0)
        part = float((result[1] == 1).float().mean())
        assert [float(targets[1, 1]), float(targets[1, 4])] == pytest.approx([part, 1 - part], abs=1e-6)
        assert set(result[1].unique().tolist()) <= {1.0, 4.0}
        other = (result[1, 0] == 4).nonzero()
        height, width = (other.max(0).values - other.min(0).values + 1).tolist() if len(other) else (0, 0)
        assert height * width == len(other)
    both, before = {"mixup": 0.4, "cutmix": 1.0}, images()[2:]
    together, targets = mixed([2, 4], [8, 9], **both)
    alone, target = mix(before, LABELS[2:], num_classes=5, config=MixConfig(**both), sizes=[4], keys=[9])
    assert torch.equal(together[2:], alone) and torch.equal(targets[2:], target)
    assert torch.equal(before, images()[2:])  # what was given is not changed
    other, _ = mixed([2, 4], [8, 10], **both)
    assert torch.equal(other[:2], together[:2]) and not torch.equal(other[2:], together[2:])
    nothing, targets = mix(images()[:0], LABELS[:0], num_classes=5, config=MixConfig(**both), sizes=[], keys=[])
    assert (len(nothing), targets.shape) == (0, (0, 5))  # a rank may have no samples in a pass
    kinds = [set(mixed([6], [key], **both)[0][1].unique().tolist()) <= {1.0, 4.0} for key in range(200)]
    assert 70 < sum(kinds) < 130  # a coin decides
