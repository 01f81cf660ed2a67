import pytest
import torch

from convoy.data import MixConfig, mix

LABELS = torch.tensor([0, 1, 2, 3, 4, 0])


def images() -> torch.Tensor:
    """Picture i is i everywhere, so that a mixture shows its parts."""
    return torch.arange(6.0).view(6, 1, 1, 1).expand(6, 3, 16, 16).clone()


def run(config: MixConfig, sizes: list[int], keys: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return mix(images(), LABELS, num_classes=5, config=config, sizes=sizes, keys=keys)


def test_off_is_one_hot():
    mixed, targets = run(MixConfig(), [6], [0])
    assert torch.equal(mixed, images())
    assert torch.equal(targets.argmax(1), LABELS)
    assert targets.sum() == 6


def test_mixup_blends_with_the_reversed_microbatch():
    mixed, targets = run(MixConfig(mixup=1.0), [4, 2], [3, 4])
    part = float(targets[0, 0])
    assert 0 < part < 1
    torch.testing.assert_close(mixed[0], torch.full((3, 16, 16), part * 0 + (1 - part) * 3))
    torch.testing.assert_close(mixed[3], torch.full((3, 16, 16), part * 3))
    second = float(targets[4, 4])
    assert second != part
    torch.testing.assert_close(mixed[4], torch.full((3, 16, 16), second * 4 + (1 - second) * 5))
    torch.testing.assert_close(targets.sum(1), torch.ones(6))


def test_cutmix_labels_have_the_area_of_the_rectangle():
    for key in range(30):
        mixed, targets = run(MixConfig(cutmix=1.0), [6], [key])
        own = float((mixed[1] == 1).float().mean())
        assert float(targets[1, 1]) == pytest.approx(own, abs=1e-6)
        assert float(targets[1, 4]) == pytest.approx(1 - own, abs=1e-6)
        assert set(mixed[1].unique().tolist()) <= {1.0, 4.0}
        other = (mixed[1, 0] == 4).nonzero()
        if len(other):
            height, width = (other.max(0).values - other.min(0).values + 1).tolist()
            assert height * width == len(other)


def test_a_microbatch_depends_on_its_key_alone():
    config = MixConfig(mixup=0.4, cutmix=1.0)
    together, targets = run(config, [2, 4], [8, 9])
    alone, target = mix(images()[2:], LABELS[2:], num_classes=5, config=config, sizes=[4], keys=[9])
    assert torch.equal(together[2:], alone)
    assert torch.equal(targets[2:], target)
    other, _ = run(config, [2, 4], [8, 10])
    assert torch.equal(other[:2], together[:2])
    assert not torch.equal(other[2:], together[2:])


def test_with_both_on_a_coin_decides():
    kinds = []
    for key in range(200):
        mixed, _ = run(MixConfig(mixup=1.0, cutmix=1.0), [6], [key])
        kinds.append(set(mixed[1].unique().tolist()) <= {1.0, 4.0})
    assert 70 < sum(kinds) < 130


def test_lambda_has_the_beta_distribution():
    parts = torch.tensor([float(run(MixConfig(mixup=0.2), [6], [key])[1][1, 1]) for key in range(2000)])
    assert float(parts.mean()) == pytest.approx(0.5, abs=0.04)
    assert float(parts.var()) == pytest.approx(1 / (4 * 1.4), abs=0.02)


def test_the_images_given_are_not_changed_and_large_keys_work():
    before = images()
    mix(before, LABELS, num_classes=5, config=MixConfig(cutmix=1.0), sizes=[6], keys=[2**64 - 1])
    assert torch.equal(before, images())


def test_a_microbatch_of_one_is_its_own_partner():
    mixed, targets = run(MixConfig(mixup=1.0), [1, 5], [1, 2])
    torch.testing.assert_close(mixed[0], images()[0])
    assert targets[0, 0] == 1
