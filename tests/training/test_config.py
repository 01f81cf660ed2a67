import pytest
from pydantic import TypeAdapter

from convoy.training.config import Duration


@pytest.mark.parametrize(
    ("text", "updates"),
    [("90ep", 900), ("0.5ep", 5), ("0.25ep", 3), ("0.01ep", 1), ("5000ba", 5000), ("0ep", 0), (3, 30), (1.5, 15)],
)
def test_in_weight_updates(text: str | float, updates: int) -> None:
    assert Duration.parse(text).updates(10) == updates


def test_tenths_of_an_epoch_are_not_cut_by_rounding() -> None:
    assert [Duration.parse(f"{n / 10}ep").updates(30) for n in range(1, 10)] == [3 * n for n in range(1, 10)]


@pytest.mark.parametrize(("text", "updates"), [("5%", 10), ("100%", 200), ("0.1%", 0), ("0%", 0)])
def test_share_of_the_run(text: str, updates: int) -> None:
    assert Duration.parse(text).updates(10, total=200) == updates


@pytest.mark.parametrize("text", ["90ep", "0.5ep", "5000ba", "5%", "2.5%", "0ep"])
def test_text_is_what_was_read(text: str) -> None:
    assert str(Duration.parse(text)) == text
    adapter = TypeAdapter(Duration)
    assert adapter.dump_python(adapter.validate_python(text), mode="json") == text


@pytest.mark.parametrize(
    "text", ["", "ninety", "90", "ep", "-1ep", "1e3ba", "1.5ba", "5 epochs", "101%", "9" * 400 + "ep", True]
)
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"90ep|at most 100%|too long"):
        Duration.parse(text)


@pytest.mark.parametrize("number", [-1, float("inf"), float("nan"), 1e300, None, [1]])
def test_odd_numbers_are_refused(number: float) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        Duration.parse(number)


def test_longer_is_known_only_in_the_same_unit() -> None:
    assert Duration(5, "ep").longer_than(Duration(4, "ep"))
    assert not Duration(4, "ep").longer_than(Duration(4, "ep"))
    assert not Duration(5000, "ba").longer_than(Duration(1, "ep"))
