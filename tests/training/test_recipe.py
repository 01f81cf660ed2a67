import hashlib
import json
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from convoy import models
from convoy.errors import ConvoyError
from convoy.training import resume
from convoy.training.derived import resolve
from convoy.training.recipe import Recipe, load_recipe, recipe_names, recipe_summary, recipe_text, to_yaml
from convoy.training.schedules import StepConfig

NEEDS = {"default": ["model.name=resnet18"], "lenet-mnist": []}


def built_in(name: str) -> Recipe:
    return load_recipe(name, NEEDS.get(name, ["data.path=photos"]))


def test_the_built_in_recipes() -> None:
    expected = ["alexnet-2012", "cifar-quick", "default", "imagenet-90", "imagenet-lars", "lenet-mnist"]
    assert recipe_names() == expected


@pytest.mark.parametrize("name", recipe_names())
def test_a_built_in_recipe_loads_and_names_a_network_of_the_registry(name: str) -> None:
    recipe = built_in(name)
    assert recipe.model.name in {info.name for info in models.list_models()}
    assert not recipe.model.zero_init_residual or models.accepts(recipe.model.name, "zero_init_residual")
    assert resolve(recipe, 1_281_167).total_updates > 0
    assert recipe.notes() == []
    assert len(recipe_summary(name)) < 100
    assert recipe_text(name).startswith(f"# {recipe_summary(name)}\n")


@pytest.mark.parametrize("name", recipe_names())
@pytest.mark.parametrize(
    "changes", [[], ["microbatches=2", "optimizer.lr=1e-05", "ema.decay=0.999", "data.mean=[0.5]", "data.std=[0.1]"]]
)
def test_written_and_read_again_it_is_the_same(name: str, changes: list[str], tmp_path: Path) -> None:
    needs = [
        *NEEDS.get(name, ["data.path=1e3"]),
        *(["schedule.warmup_from=0"] if changes and name == "imagenet-90" else []),
    ]
    recipe = load_recipe(name, [*needs, *changes])
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(recipe))
    assert load_recipe(str(path)) == recipe
    assert load_recipe(str(path), ["seed=1"]) != recipe
    assert yaml.safe_load(to_yaml(recipe))["batch"] == recipe.batch


def test_the_default_recipe_says_the_defaults_and_clips() -> None:
    plain = Recipe.model_validate({"model": {"name": "resnet18"}, "data": {"path": "mnist-mini"}})
    assert built_in("default") == plain.model_copy(update={"clip_norm": 1.0})


def test_a_recipe_of_ones_own_may_be_short(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("model: {name: lenet}\ndata: {path: mnist-mini}\n")
    assert load_recipe(str(path), ["optimizer.lr=0.4"]).optimizer.lr == 0.4


def test_nothing_changes_after_the_check() -> None:
    recipe = built_in("lenet-mnist")
    with pytest.raises(ValidationError, match="frozen"):
        recipe.batch = 3  # type: ignore[misc]


def test_alexnet_2012_is_that_of_the_paper() -> None:
    recipe = built_in("alexnet-2012")
    assert (recipe.batch, str(recipe.epochs)) == (256, "100ep")
    assert recipe.optimizer.model_dump(include={"name", "lr", "momentum", "nesterov", "weight_decay"}) == {
        "name": "sgd", "lr": 0.01, "momentum": 0.9, "nesterov": False, "weight_decay": 0.0005
    }  # fmt: skip
    assert isinstance(recipe.schedule, StepConfig)
    assert (len(recipe.schedule.milestones), recipe.schedule.factor) == (3, 0.1)
    assert (recipe.data.resize, recipe.data.image_size, recipe.data.augment.pca_noise) == (256, 224, 0.1)


def test_options_without_effect_are_noted() -> None:
    recipe = load_recipe(
        "imagenet-90",
        ["data.path=x", "model.weights=w.pth", "epochs=70ep", "checkpoint.every=80ep", "batch=16", "microbatch=64"],
    )
    assert [note.partition(" ")[0] for note in recipe.notes()] == [
        "model.zero_init_residual", "schedule.milestones", "microbatch=64", "checkpoint.every=80ep"
    ]  # fmt: skip


@pytest.mark.parametrize("mix", ["mixup", "cutmix"])
def test_mixing_without_partners_is_noted_and_refused_where_it_is_asked_for(tmp_path: Path, mix: str) -> None:
    path, alone = tmp_path / "mine.yaml", ["batch=12", "microbatch=1"]
    path.write_text(f"model: {{name: lenet}}\ndata: {{path: mnist-mini, mix: {{{mix}: 0.2}}}}\n")
    sentence = (
        f"data.mix.{mix} has no effect: a microbatch of one sample has no other to mix it with; make microbatches "
        "larger, e.g. microbatch=32, or leave that out"
    )
    assert load_recipe(str(path)).notes() == []
    assert load_recipe(str(path), alone).notes() == [sentence]
    assert load_recipe(str(path), ["batch=12", "microbatches=12"]).notes() == [sentence]
    assert load_recipe(str(path), ["batch=12", "microbatches=11"]).notes() == []
    for one in (alone, ["batch=12", "microbatches=12"]):
        with pytest.raises(ConvoyError) as caught:
            load_recipe("default", ["model.name=lenet", f"data.mix.{mix}=0.2", *one])
        assert str(caught.value) == sentence
    load_recipe("default", ["model.name=lenet", f"data.mix.{mix}=0", *alone])
    load_recipe("default", ["model.name=lenet", f"data.mix.{mix}=0.2", "batch=12", "microbatch=2"])


def test_the_name_of_the_network_alone_is_a_short_form(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("model: lenet\ndata: {path: mnist-mini}\n")
    assert load_recipe(str(tmp_path / "mine.yaml")).model.name == "lenet"


def test_checkpoints_of_before_the_decoder_are_still_those_of_their_recipe():
    """A recipe that names none has the checksum that it had when there was no such key."""
    recipe = load_recipe("default", ["model.name=lenet"])
    document = recipe.model_dump(mode="json")
    del document["data"]["decoder"], document["extends"]
    leaves = {key: value for key, value in resume._leaves(document) if not resume._is_below(key, resume.FREE)}
    expected = hashlib.sha256(json.dumps([leaves, 7, 3], sort_keys=True).encode()).hexdigest()
    assert resume.identity(recipe, 7, 3) == expected
    turbo = load_recipe("default", ["model.name=lenet", "data.decoder=turbo"])
    assert resume.identity(turbo, 7, 3) != expected
