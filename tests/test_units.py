import pytest

from convoy import units


def words(text: str) -> str:
    return text.replace(units.SPACE, " ")


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (units.count(61706), "61,706"),
        (units.count(-1234), "−1,234"),
        (units.decimal(float("nan"), 2), "–"),
        (units.significant(0.05794), "0.0579"),
        (units.significant(1234.5), "1,234"),
        (units.significant(3.2e-7), "3.20 · 10⁻⁷"),
        (units.significant(0), "0"),
        (units.tick(0.5), "0.5"),
        (units.tick(12500), "12,500"),
        (units.tick(200_000), "200 k"),
        (units.tick(2e6), "2 M"),
        (units.tick(1e-5), "10⁻⁵"),
        (units.tick(2e-6), "2·10⁻⁶"),
        (units.tick(-0.1), "−0.1"),
        (units.percent(0.98, 1), "98.0 %"),
        (units.percent(0.99999, 1), "> 99.9 %"),
        (units.percent(0.00001, 2), "< 0.01 %"),
        (units.percent(1.0, 1), "100.0 %"),
        (units.percent(None), "–"),
        (units.prefixed(4.09e9, "FLOP"), "4.09 GFLOP"),
        (units.prefixed(999_999, "B"), "1.00 MB"),
        (units.prefixed(12, "B"), "12 B"),
        (units.duration(0.84), "0.84 s"),
        (units.duration(42.31), "42.3 s"),
        (units.duration(59.99), "1 min 00 s"),
        (units.duration(134), "2 min 14 s"),
        (units.duration(3 * 3600 + 299), "3 h 05 min"),
        (units.duration(86_399), "24 h 00 min"),
        (units.duration(9.3 * 86_400), "9 d 07 h"),
        (units.plural(1, "image"), "1 image"),
        (units.plural(2000, "image"), "2,000 images"),
        (units.value(True), "yes"),
        (units.value(0.1), "0.1"),
        (units.value(0.0), "0"),
        (units.value([32] * 4), "32, 32, 32, 32"),
        (units.value([1] * 10), "1, 1, 1, 1, 1, 1, 1, 1, … (10 in all)"),
        (units.value({"image_size": 28, "mean": [0.1, 0.2]}), "image size: 28; mean: 0.1, 0.2"),
        (units.shorten("abc", 3), "abc"),
        (units.shorten("abcd", 3), "ab…"),
    ],
)
def test_numbers_are_printed_as_in_a_paper(made: str, expected: str) -> None:
    assert words(made) == expected


def test_wilson_interval_is_that_of_its_formula() -> None:
    low, high = units.wilson(0.9, 100)  # (0.919207 ∓ 0.061859) / 1.038415, by hand
    assert (round(low, 4), round(high, 4)) == (0.8256, 0.9448)
    assert units.wilson(1.0, 10)[1] == pytest.approx(1)
    assert units.wilson(0.0, 10)[0] == pytest.approx(0)
