"""Random numbers that depend on seed, step, layer and sample alone."""

import torch

from convoy.ops.random_bits import fold, layer_key, random_bits, sample_keys


def test_a_sample_has_the_same_numbers_in_every_batch() -> None:
    whole = random_bits(sample_keys(1, 2, range(8)), layer_key("drop"), 50)
    part = random_bits(sample_keys(1, 2, [5, 6]), layer_key("drop"), 50)
    assert torch.equal(whole[5:7], part)


def test_number_i_does_not_depend_on_how_many_are_drawn() -> None:
    keys = sample_keys(1, 2, range(4))
    assert torch.equal(random_bits(keys, 7, 100)[:, :30], random_bits(keys, 7, 30))


def test_chosen_elements_have_the_numbers_of_the_whole() -> None:
    keys, chosen = sample_keys(1, 2, range(4)), torch.tensor([90, 3, 41], dtype=torch.int32)
    assert torch.equal(random_bits(keys, 7, 100)[:, chosen], random_bits(keys, 7, chosen))


def test_seed_step_layer_and_sample_all_matter() -> None:
    base = random_bits(sample_keys(0, 0, [0]), layer_key("a"), 1000)
    others = [
        random_bits(sample_keys(1, 0, [0]), layer_key("a"), 1000),
        random_bits(sample_keys(0, 1, [0]), layer_key("a"), 1000),
        random_bits(sample_keys(0, 0, [1]), layer_key("a"), 1000),
        random_bits(sample_keys(0, 0, [0]), layer_key("b"), 1000),
    ]
    assert all((base == other).float().mean() < 0.01 for other in others)


def test_numbers_are_uniform_and_uncorrelated() -> None:
    bits = random_bits(sample_keys(3, 4, range(64)), layer_key("drop"), 4096)
    share = (bits.double() + 2**31) / 2**32
    counts = torch.histc(share, bins=64, min=0, max=1)
    expected = share.numel() / 64
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 120  # 63 degrees of freedom: 1 in 20,000 is above
    across = torch.corrcoef(share).fill_diagonal_(0).abs().max()
    neighbours = torch.corrcoef(torch.stack([share[:, :-1].flatten(), share[:, 1:].flatten()]))[0, 1].abs()
    assert across < 0.08
    assert neighbours < 0.01


def test_fold_is_a_function_of_all_parts_in_order() -> None:
    assert fold(1, 2) == fold(1, 2)
    assert len({fold(1, 2), fold(2, 1), fold(1, 2, 0), fold(1), fold(-1)}) == 5
