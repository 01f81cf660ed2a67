"""How a global batch is cut into microbatches, and which of them run together in one pass."""


def microbatch_sizes(batch: int, num_microbatches: int) -> tuple[int, ...]:
    """Cut `batch` samples into microbatches as even as can be, the larger ones first.

    Returns:
        `num_microbatches` sizes that add up to `batch` and differ by one sample at most.
    """
    assert 1 <= num_microbatches <= batch, f"{num_microbatches} microbatches of {batch} samples"
    size, larger = divmod(batch, num_microbatches)
    return (size + 1,) * larger + (size,) * (num_microbatches - larger)


def passes(sizes: tuple[int, ...], merge: int) -> list[tuple[int, ...]]:
    """Group consecutive microbatches into passes of at most `merge` microbatches, as even as can be."""
    counts = microbatch_sizes(len(sizes), -(-len(sizes) // merge))
    groups, start = [], 0
    for count in counts:
        groups.append(sizes[start : start + count])
        start += count
    return groups
