import pytest

from convoy.errors import ConvoyError
from convoy.training.recipe import apply_overrides, load_recipe, parse_overrides
from convoy.training.schedules import CosineConfig, PolynomialConfig


def test_values_are_yaml() -> None:
    recipe = load_recipe(
        "default",
        [
            "model.name=lenet",
            "optimizer.lr=1e-3",
            "model.options={image_size: 32}",
            "data.augment.flip=true",
            "epochs=5000ba",
        ],
    )
    assert recipe.optimizer.lr == 1e-3
    assert recipe.model.options == {"image_size": 32}
    assert recipe.data.augment.flip is True
    assert str(recipe.epochs) == "5000ba"


@pytest.mark.parametrize("path", ["2012", "1e5", "[x]", "a: b", "#1", "C:\\data", "my photos", "true"])
def test_a_path_is_taken_as_it_stands(path: str) -> None:
    assert load_recipe("cifar-quick", [f"data.path={path}"]).data.path == path


def test_a_quoted_path_loses_its_quotes() -> None:
    assert load_recipe("cifar-quick", ["data.path='null'"]).data.path == "null"


def test_lr_takes_the_place_of_base_lr_and_back() -> None:
    recipe = load_recipe("imagenet-90", ["data.path=x", "optimizer.lr=0.4", "schedule.warmup_from=0.1"])
    assert (recipe.optimizer.lr, recipe.optimizer.base_lr) == (0.4, None)
    recipe = load_recipe("lenet-mnist", ["optimizer.base_lr=0.2"])
    assert (recipe.optimizer.lr, recipe.optimizer.base_lr) == (None, 0.2)


def test_microbatches_take_the_place_of_microbatch() -> None:
    recipe = load_recipe("lenet-mnist", ["microbatches=4"])
    assert (recipe.microbatch, recipe.microbatches) == (None, 4)


def test_another_optimizer_drops_the_numbers_of_the_old_one_and_says_so() -> None:
    notes: list[str] = []
    recipe = load_recipe("imagenet-90", ["data.path=x", "optimizer.name=adamw", "optimizer.base_lr=1e-3"], notes)
    assert recipe.optimizer.name == "adamw"
    assert recipe.optimizer.weight_decay == 0.01
    assert notes == [
        "optimizer.name=adamw takes the place of sgd: momentum=0.9, nesterov=true, weight_decay=0.0001, "
        "decay_norm_and_bias=false no longer apply"
    ]


def test_another_schedule_keeps_the_warmup() -> None:
    notes: list[str] = []
    recipe = load_recipe("imagenet-90", ["data.path=x", "schedule.name=cosine"], notes)
    assert isinstance(recipe.schedule, CosineConfig)
    assert str(recipe.schedule.warmup) == "5ep"
    assert recipe.schedule.warmup_from == "base_lr"
    assert notes == [
        "schedule.name=cosine takes the place of step: milestones=[30ep, 60ep, 80ep], factor=0.1 no longer apply"
    ]


def test_the_same_name_changes_nothing() -> None:
    notes: list[str] = []
    assert load_recipe("lenet-mnist", ["optimizer.name=sgd"], notes) == load_recipe("lenet-mnist")
    assert notes == []


def test_a_whole_section_comes_before_its_keys() -> None:
    recipe = load_recipe(
        "default", ["model.name=lenet", "schedule.power=3", "schedule={name: polynomial, warmup: 3ba}", "ema.decay=0.9"]
    )
    assert recipe.schedule == PolynomialConfig(name="polynomial", warmup="3ba", power=3)
    assert recipe.ema is not None


def test_the_same_key_twice_is_refused_unless_the_values_agree() -> None:
    with pytest.raises(ConvoyError, match="batch is set twice, to 64 and to 128"):
        parse_overrides(["batch=64", "batch=128"], lambda key: False)
    assert parse_overrides(["batch=64", "batch=64"], lambda key: False) == {"batch": 64}


def test_a_key_below_a_number_is_refused() -> None:
    with pytest.raises(ConvoyError, match=r"batch\.size cannot be set: batch is 128, not a section"):
        apply_overrides({"batch": 128}, {"batch.size": 3})
