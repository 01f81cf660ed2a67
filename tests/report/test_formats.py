import pytest

from convoy.report import formats


def words(text: str) -> str:
    return text.replace(formats.SPACE, " ")


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (formats.count(61706), "61,706"),
        (formats.count(-1234), "−1,234"),
        (formats.decimal(float("nan"), 2), "–"),
        (formats.significant(0.05794), "0.0579"),
        (formats.significant(1234.5), "1,234"),
        (formats.significant(3.2e-7), "3.20 · 10⁻⁷"),
        (formats.significant(0), "0"),
        (formats.tick(0.5), "0.5"),
        (formats.tick(12500), "12,500"),
        (formats.tick(200_000), "200 k"),
        (formats.tick(2e6), "2 M"),
        (formats.tick(1e-5), "10⁻⁵"),
        (formats.tick(2e-6), "2·10⁻⁶"),
        (formats.tick(-0.1), "−0.1"),
        (formats.percent(0.98, 1), "98.0 %"),
        (formats.percent(0.99999, 1), "> 99.9 %"),
        (formats.percent(0.00001, 2), "< 0.01 %"),
        (formats.percent(1.0, 1), "100.0 %"),
        (formats.percent(None), "–"),
        (formats.prefixed(4.09e9, "FLOP"), "4.09 GFLOP"),
        (formats.prefixed(999_999, "B"), "1.00 MB"),
        (formats.prefixed(12, "B"), "12 B"),
        (formats.duration(0.84), "0.84 s"),
        (formats.duration(42.31), "42.3 s"),
        (formats.duration(59.99), "1 min 00 s"),
        (formats.duration(134), "2 min 14 s"),
        (formats.duration(3 * 3600 + 299), "3 h 05 min"),
        (formats.duration(86_399), "24 h 00 min"),
        (formats.duration(9.3 * 86_400), "9 d 07 h"),
        (formats.plural(1, "image"), "1 image"),
        (formats.plural(2000, "image"), "2,000 images"),
        (formats.value(True), "yes"),
        (formats.value(0.1), "0.1"),
        (formats.value(0.0), "0"),
        (formats.value([32] * 4), "32, 32, 32, 32"),
        (formats.value([1] * 10), "1, 1, 1, 1, 1, 1, 1, 1, … (10 in all)"),
        (formats.shorten("abc", 3), "abc"),
        (formats.shorten("abcd", 3), "ab…"),
    ],
)
def test_numbers_are_printed_as_in_a_paper(made: str, expected: str) -> None:
    assert words(made) == expected


def test_wilson_interval_is_that_of_its_formula() -> None:
    low, high = formats.wilson(0.9, 100)  # (0.919207 ∓ 0.061859) / 1.038415, by hand
    assert (round(low, 4), round(high, 4)) == (0.8256, 0.9448)
    assert formats.wilson(1.0, 10)[1] == pytest.approx(1)
    assert formats.wilson(0.0, 10)[0] == pytest.approx(0)
