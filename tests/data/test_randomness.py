import numpy as np

from convoy.data.order import Purpose, keys, normals, uniforms

SAMPLES = np.arange(20_000)


def test_a_samples_numbers_do_not_depend_on_the_other_samples():
    together = uniforms(7, Purpose.CROP, 3, SAMPLES, 4)
    alone = uniforms(7, Purpose.CROP, 3, np.array([123]), 2)
    np.testing.assert_array_equal(together[123, :2], alone[0])


def test_seed_purpose_epoch_and_sample_all_matter():
    base = uniforms(1, Purpose.CROP, 2, SAMPLES[:3], 2)
    for other in (
        uniforms(2, Purpose.CROP, 2, SAMPLES[:3], 2),
        uniforms(1, Purpose.FLIP, 2, SAMPLES[:3], 2),
        uniforms(1, Purpose.CROP, 3, SAMPLES[:3], 2),
        uniforms(1, Purpose.CROP, 2, SAMPLES[3:6], 2),
        # What a sum of the parts would not tell apart.
        uniforms(2, Purpose.CROP, 1, SAMPLES[:3], 2),
    ):
        assert not np.isin(base, other).any()


def test_the_numbers_are_uniform_and_independent():
    numbers = uniforms(0, Purpose.CROP, 0, SAMPLES, 4)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    for column in numbers.T:
        counts = np.histogram(column, 50, (0, 1))[0]
        chi2 = ((counts - 400) ** 2 / 400).sum()
        assert 20 < chi2 < 95  # 49 degrees of freedom
    everything = np.hstack(
        [numbers, uniforms(0, Purpose.FLIP, 0, SAMPLES, 1), uniforms(0, Purpose.CROP, 1, SAMPLES, 1)]
    )
    correlation = np.corrcoef(everything.T) - np.eye(6)
    assert np.abs(correlation).max() < 0.03
    neighbours = np.corrcoef(numbers[:-1, 0], numbers[1:, 0])[0, 1]
    assert abs(neighbours) < 0.03


def test_keys_never_collide():
    assert len(np.unique(keys(5, Purpose.ORDER, 0, np.arange(1_000_000)))) == 1_000_000


def test_any_seed_will_do():
    for seed in (0, 2**63, 2**64 - 1, -1):
        assert 0 <= uniforms(seed, Purpose.CROP, 0, np.array([2**40]), 1)[0, 0] < 1


def test_normals():
    numbers = np.array(normals(uniforms(0, Purpose.PCA, 0, SAMPLES, 1)[:, 0]))
    assert abs(numbers.mean()) < 0.03
    assert abs(numbers.std() - 1) < 0.03
    assert np.isfinite(normals(np.array([0.0, 1 - 2**-53]))).all()
