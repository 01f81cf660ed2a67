"""The checkpoint section of a recipe: read, written back, and refused in a sentence."""

import pytest

from convoy.documents import parse
from convoy.errors import ConvoyError
from convoy.training.derived import derive
from convoy.training.recipe import Recipe, load_recipe, to_yaml, validate


def recipe(*settings: str) -> Recipe:
    return load_recipe("default", ["model.name=lenet", "data.path=x", "batch=10", *settings])


@pytest.mark.parametrize("every", ["auto", "2ep", "500ba", "5%"])
def test_a_recipe_comes_back(every: str) -> None:
    made = recipe(f"checkpoint.every={every}", "checkpoint.mtbf=30min", "checkpoint.on_error=continue")
    assert str(made.checkpoint.every) == every
    assert made.checkpoint.mtbf.seconds == 1800
    assert validate(parse(to_yaml(made), "recipe")) == made


def test_what_follows_is_shown() -> None:
    (row,) = [row for row in derive(recipe(), 1000) if row.name == "checkpoint every"]
    assert (row.value, row.formula, row.source) == ("auto", "sqrt(2 · cost · 6h) when the cost is known", "Young 1974")
    (row,) = [row for row in derive(recipe("checkpoint.every=2ep"), 1000) if row.name == "checkpoint every"]
    assert row.value == 200


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("checkpoint.every=often", ["checkpoint.every", "90ep or 0.5ep"]),
        ("checkpoint.every=0ba", ["checkpoint.every", "more than 0"]),
        ("checkpoint.mtbf=6", ["checkpoint.mtbf", "90s, 30min, 6h or 2d"]),
        ("checkpoint.mtbf=0h", ["checkpoint.mtbf", "more than 0"]),
        ("checkpoint.on_error=contineu", ["checkpoint.on_error", "did you mean continue"]),
    ],
)
def test_mistakes(setting: str, words: list[str]) -> None:
    with pytest.raises(ConvoyError) as refused:
        recipe(setting)
    assert [word for word in words if word not in str(refused.value)] == []


def test_what_has_no_effect_is_said() -> None:
    assert recipe("checkpoint.mtbf=30min").notes() == []
    (note,) = recipe("checkpoint.mtbf=30min", "checkpoint.every=2ep").notes()
    assert note == "checkpoint.mtbf has no effect: checkpoint.every=2ep says when"
