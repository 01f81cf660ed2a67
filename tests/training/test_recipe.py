"""Recipes: what they say and leave open, what follows from them, and mistakes in them, one sentence each."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from convoy import models
from convoy.errors import ConvoyError
from convoy.training.config import Duration, TimeSpan
from convoy.training.derived import derive, resolve
from convoy.training.parallel_config import ParallelConfig, fitted
from convoy.training.recipe import Recipe, load_recipe, recipe_names, recipe_summary, recipe_text, to_yaml
from convoy.training.schedules import CosineConfig

NEEDS = {"default": ["model.name=resnet18"], "lenet-mnist": []}
CHANGES = ["microbatches=2", "optimizer.lr=1e-05", "ema.decay=0.999", "data.mean=[0.5]", "data.std=[0.1]"]
CHANGES += ["checkpoint.mtbf=30min", "checkpoint.on_error=continue", "checkpoint.every=5%"]


def default(*settings: str, name: str = "default") -> Recipe:
    return load_recipe(name, [*(["model.name=lenet"] if name == "default" else []), *settings])


@pytest.mark.parametrize("name", recipe_names())
def test_a_built_in_recipe_is_whole_and_comes_back_as_it_was_written(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name, NEEDS.get(name, ["data.path=photos"]))
    assert recipe.model.name in {info.name for info in models.list_models()}
    assert not recipe.model.zero_init_residual or models.accepts(recipe.model.name, "zero_init_residual")
    assert resolve(recipe, 1_281_167).total_updates > 0 and recipe.notes() == []
    assert recipe_text(name).startswith(f"# {recipe_summary(name)}\n") and len(recipe_summary(name)) < 100
    with pytest.raises(ValidationError, match="frozen"):
        recipe.batch = 3  # type: ignore[misc]
    path = tmp_path / "config.yaml"
    for changes in ([], CHANGES + ["schedule.warmup_from=0"] * (name == "imagenet-90")):
        changed = load_recipe(name, [*NEEDS.get(name, ["data.path=1e3"]), *changes])
        path.write_text(to_yaml(changed))
        assert load_recipe(str(path)) == changed != load_recipe(str(path), ["seed=1"])


def test_the_default_recipe_says_the_defaults_and_clips_and_a_short_one_says_no_more(tmp_path: Path) -> None:
    assert len(recipe_names()) == 6
    plain = Recipe.model_validate({"model": {"name": "resnet18"}, "data": {"path": "mnist-mini"}})
    assert load_recipe("default", NEEDS["default"]) == plain.model_copy(update={"clip_norm": 1.0})
    (tmp_path / "mine.yaml").write_text("model: lenet\ndata: {path: mnist-mini}\n")
    mine = load_recipe(str(tmp_path / "mine.yaml"), ["optimizer.lr=0.4"])
    assert (mine.model.name, mine.optimizer.lr) == ("lenet", 0.4)


def test_what_has_no_effect_is_noted_and_mixing_without_partners_refused_where_it_is_asked_for() -> None:
    changes = ["data.path=x", "model.weights=w.pth", "epochs=70ep", "checkpoint.every=80ep", "batch=16"]
    changes += ["microbatch=64", "checkpoint.mtbf=30min"]
    notes = default(*changes, name="imagenet-90").notes()
    known = ["model.zero_init_residual", "schedule.milestones", "microbatch=64", "checkpoint.every=80ep"]
    assert {note.partition(" ")[0] for note in notes} == {*known, "checkpoint.mtbf"}
    words = "data.mix.mixup has no effect: a microbatch of one sample has no other to mix it with"
    with pytest.raises(ConvoyError, match=words):
        default("data.mix.mixup=0.2", "batch=12", "microbatch=1")


# What is set


def test_values_are_yaml_and_paths_are_taken_as_they_stand() -> None:
    recipe = default("optimizer.lr=1e-3", "model.options={image_size: 32}", "data.augment.flip=true", "epochs=5000ba")
    assert (recipe.optimizer.lr, recipe.model.options) == (1e-3, {"image_size": 32})
    assert recipe.data.augment.flip is True and str(recipe.epochs) == "5000ba"
    for path in ("2012", "1e5", "[x]", "a: b", "#1", "C:\\data", "my photos", "true", "'null'"):
        assert default(f"data.path={path}").data.path == path.strip("'")


def test_one_key_takes_the_place_of_another_and_that_is_said_of_what_is_lost() -> None:
    recipe = default("data.path=x", "optimizer.lr=0.4", "schedule.warmup_from=0.1", name="imagenet-90")
    assert (recipe.optimizer.lr, recipe.optimizer.base_lr) == (0.4, None)
    recipe = default("optimizer.base_lr=0.2", "microbatches=4", name="lenet-mnist")
    assert (recipe.optimizer.lr, recipe.optimizer.base_lr, recipe.microbatch) == (None, 0.2, None)
    notes: list[str] = []
    changes = ["data.path=x", "optimizer.name=adamw", "optimizer.base_lr=1e-3", "schedule.name=cosine"]
    recipe = load_recipe("imagenet-90", changes, notes)
    assert recipe.optimizer.weight_decay == 0.01 and isinstance(recipe.schedule, CosineConfig)
    assert (str(recipe.schedule.warmup), recipe.schedule.warmup_from) == ("5ep", "base_lr")
    assert sorted(notes) == [
        "optimizer.name=adamw takes the place of sgd: momentum=0.9, nesterov=true, weight_decay=0.0001, "
        "decay_norm_and_bias=false no longer apply",
        "schedule.name=cosine takes the place of step: milestones=[30ep, 60ep, 80ep], factor=0.1 no longer apply",
    ]
    notes.clear()
    assert load_recipe("lenet-mnist", ["optimizer.name=sgd", "batch=64", "batch=64"], notes).batch == 64 and not notes


# Changes to the default recipe with a model, and what the sentence must say: the key, the problem, the way out.
WRONG = [
    ("optimizer.name=adam", "must be sgd, adamw, lars or lamb|did you mean adamw?"),
    ("batch=12.5", "batch is 12.5|a whole number"),
    ("schedule=cosine", "schedule is cosine|a section"),
    ("schedule.warmup_from=high", "schedule.warmup_from is high|a number or base_lr"),
    ("data.augment.scale=[0.5]", "data.augment.scale is [0.5]|longer list"),
    ("optimizer.lr=.nan", "optimizer.lr is nan|a finite number"),
    ("optimizer.momentum=1", "optimizer.momentum is 1|less than 1"),
    ("ema={}", "ema.decay is missing|--set ema.decay="),
    ("checkpoint.every=often", "checkpoint.every|90ep or 0.5ep"),
    ("epochs=0", "epochs: 0ep|more than 0"),
    ("optimizer.name=adamw optimizer.lr=1e-3 optimizer.nesterov=true", "optimizer.nesterov would be ignored|adamw"),
    ("optimizer.momentum=0", "optimizer.nesterov would be ignored without momentum"),
    ("optimizer.name=lamb", "optimizer.lr and optimizer.base_lr are both missing|square root"),
    ("schedule.name=step schedule.milestones=[]", "schedule.milestones is []|1 or more"),
    ("optimizer.lr=1 schedule.warmup_from=base_lr", "schedule.warmup_from=base_lr needs optimizer.base_lr"),
    ("microbatch=4 microbatches=3", "microbatch and microbatches are both given"),
    ("data.mean=[0.5]", "data: mean and std belong together"),
    ("batch=1 batch=2", "batch is set twice"),
    ("batch.size=3", "batch.size cannot be set|not a section"),
    ("batch=0 precision=fp8 optimizer.momntum=1", "optimizer.momntum is unknown|(also wrong: batch, precision)"),
]
FILES = [
    ("model: {name: lenet}\ndata: {path: x}\noptimizer: {lr: 1}", "optimizer.name is missing: it is one of sgd"),
    ("model: {name: lenet}\ndata: {path: x}\nseed: !!binary aGVsbG8=", "write the value itself"),
    ("model: {name: lenet}\nmodel: {name: vgg16}", "line 2: the key model is twice"),
]
# What only the data can tell, of 1,000 samples.
LATE = [
    ("epochs=20ba schedule.warmup=3ep", "schedule.warmup=3ep is 21 weight updates, but the whole run has 20"),
    ("schedule.warmup_from=0.5", "schedule.warmup_from=0.5 lies above the peak learning rate 0.05"),
    ("schedule.name=step schedule.milestones=[3ep,2ep]", "do not rise"),
    ("schedule.name=step schedule.milestones=[1ep,5ep] schedule.warmup=2ep", "inside schedule.warmup=2ep"),
]


def test_what_is_wrong_is_one_sentence_with_the_key_and_the_way_out(tmp_path: Path) -> None:
    rows = [("default", ["model.name=lenet", *changes.split(" ")], words) for changes, words in WRONG + LATE]
    for number, (text, words) in enumerate(FILES):
        (tmp_path / f"{number}.yaml").write_text(text)
        rows.append((str(tmp_path / f"{number}.yaml"), [], words))
    for name, changes, words in [*rows, ("default", [], "model.name is missing"), ("no/such", [], "is no recipe file")]:
        with pytest.raises(ConvoyError) as caught:
            resolve(load_recipe(name, changes), 1000)
        sentence = str(caught.value)
        assert [word for word in words.split("|") if word not in sentence] == [], sentence
        assert not [word for word in ("\n", "pydantic", "Input should") if word in sentence]


# What follows


def test_durations_are_counted_in_weight_updates_and_what_is_none_is_refused() -> None:
    updates = {"90ep": 900, "0.25ep": 3, "0.01ep": 1, "5000ba": 5000, "5%": 10, "0.1%": 0, "0%": 0}
    for text, number in updates.items():
        assert Duration.parse(text).updates(10, total=200) == number and str(Duration.parse(text)) == text
    for odd in ["", "90", "-1ep", "1e3ba", "1.5ba", "101%", "9" * 400 + "ep", True, float("nan"), None, [1]]:
        with pytest.raises(ValueError, match=r"90ep|at most 100%|is not a duration"):
            Duration.parse(odd)
    for odd in ["6", 6, "-1h", "0h", "1e3s", None, "9" * 50 + "s"]:
        with pytest.raises(ValueError, match=r"write (90s|more than 0)"):
            TimeSpan.parse(odd)
    spans = {text: TimeSpan.parse(text).seconds for text in ("90s", "1.5 min", "6h", " 2d ")}
    assert list(spans.values()) == [90, 90, 21600, 172800]


def test_every_quantity_says_how_and_why() -> None:
    """Goyal et al., 2017, at batch 8,192."""
    found = {row.name: row for row in derive(default("data.path=x", "batch=8192", name="imagenet-90"), 1_281_167)}
    want = {"weight updates per epoch": 156, "weight updates": 14_040, "microbatches": 256, "evaluation every": 156}
    want |= {"samples per microbatch": 32, "weight updates of warm-up": 780, "peak learning rate": pytest.approx(3.2)}
    want |= {"learning rate drops at updates": "4680, 9360, 12480"}
    assert {name: found[name].value for name in want} == want
    assert found["peak learning rate"].formula == "0.1 · 8192 / 256" and "Goyal" in found["peak learning rate"].source


def test_lines_of_metrics_come_often_enough_and_the_last_is_not_of_a_few_updates() -> None:
    for total, interval in {1: 1, 49: 1, 187: 3, 999: 19, 450_000: 20}.items():
        numbers = resolve(default("data.path=x", f"epochs={total}ba"), 60_000)
        made = [done for done in range(1, total + 1) if numbers.logged(done)]
        assert numbers.log_every == interval and len(made) >= min(total, 50) and (made[0], made[-1]) == (1, total)
        assert total == 1 or 2 * (made[-1] - made[-2]) >= interval


# On another number of devices

SHARES = [
    ("sample=2,filter=4", (3, 1), 6, True),  # sample=2,filter=3
    ("sample=2,filter=2", (3, 1), 2, False),  # sample=1,filter=2
    ("filter=4", (3, 3, 2, 2), 4, False),
    ("auto", (3, 1), 4, True),  # of the planner's choices those with two parts
    ("auto", (3, 2, 1), 4, False),
]


def test_shares_belong_to_the_parts_of_the_batch() -> None:
    for plan, shares, devices, kept in SHARES:
        notes: list[str] = []
        found = fitted(ParallelConfig(devices=4, plan=plan, shares=shares), devices, False, False, notes)
        assert (found.shares == shares) is kept, (plan, shares)
        assert any("left out" in note for note in notes) is not kept
