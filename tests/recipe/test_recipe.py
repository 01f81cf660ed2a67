"""Recipes: what they say and leave open, what follows from them, and mistakes in them, one sentence each."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from convoy import models
from convoy.errors import ConvoyError
from convoy.recipe.recipe import load_recipe, recipe_names, recipe_summary, recipe_text, to_yaml
from convoy.training.derived import resolve

NEEDS = {"default": ["model.name=resnet18"], "lenet-mnist": []}
CHANGES = ["microbatches=2", "optimizer.lr=1e-05", "ema.decay=0.999", "data.mean=[0.5]", "data.std=[0.1]"]
CHANGES += ["checkpoint.mtbf=30min", "checkpoint.on_error=continue", "checkpoint.every=5%"]


@pytest.mark.parametrize("name", recipe_names())
def test_a_built_in_recipe_is_whole_and_comes_back_as_it_was_written(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name, NEEDS.get(name, ["data.path=photos"]))
    assert recipe.model.name in {info.name for info in models.list_models()}
    assert not recipe.model.zero_init_residual or models.accepts(recipe.model.name, "zero_init_residual")
    assert resolve(recipe, 1_281_167).total_updates > 0 and [*recipe.notes()] == []
    assert recipe_text(name).startswith(f"# {recipe_summary(name)}\n") and len(recipe_summary(name)) < 100
    with pytest.raises(ValidationError, match="frozen"):
        recipe.batch = 3  # type: ignore[misc]
    path = tmp_path / "config.yaml"
    instead = ["schedule.warmup_from=0"] * (name == "imagenet-90") + ["lookahead=null"] * name.startswith("cifar10")
    for changes in ([], CHANGES + instead):
        changed = load_recipe(name, [*NEEDS.get(name, ["data.path=1e3"]), *changes])
        path.write_text(to_yaml(changed))
        assert load_recipe(str(path)) == changed != load_recipe(str(path), ["seed=1"])


# Changes to the default recipe with a model, and what the sentence must say: the key, the problem, the way out.
WRONG = [
    ("optimizer.name=adam", "must be sgd, adamw, lars or lamb|did you mean adamw?"),
    ("optimizer=adam", "optimizer is adam, but|write optimizer.name=adamw"),
    ("loss.name=ce", "loss.name is ce, but|did you mean cross-entropy?"),
    ("clip_norm=None", "clip_norm is None: write null"),
    ("parallel.memory_limit=8", "the limit 8 is no size: write e.g. 8GB"),
    ("optimizer.lr=.nan", "optimizer.lr is nan|a finite number"),
    ("ema={}", "ema.decay is missing|--set ema.decay="),
    ("model.whiten=9 model.weights=x.pth", "model.whiten would replace the first layer of model.weights"),
    ("ema.decay=0.9 lookahead.every=5", "ema and lookahead would both say which weights are delivered"),
    ("data.augment.padding=reflect", "padding would be ignored with crop=none"),
    ("data.evaluation_size=64", "evaluation_size would cut otherwise than resize says with augment.crop=none"),
    ("data.augment.crop=random-resized data.resize=60 data.evaluation_size=64", "smaller than evaluation_size=64"),
    ("data.progressive.from_size=8 data.progressive.begin=2 data.progressive.end=1", "end=1 is not after progressive."),
    ("batch=8 data.repeats=9", "data.repeats=9 views make no batch=|lower that"),
    ("loss.target_threshold=0.2", "loss.target_threshold would be ignored with cross-entropy"),
    ("epochs=0", "epochs: 0ep|more than 0"),
    ("optimizer.name=adamw optimizer.lr=1e-3 optimizer.nesterov=true", "optimizer.nesterov would be ignored|adamw"),
    ("optimizer.name=lamb", "optimizer.lr and optimizer.base_lr are both missing|square root"),
    ("microbatch=4 microbatches=3", "microbatch and microbatches are both given"),
    ("batch=1 batch=2", "batch is set twice"),
    ("mix.mixup=0.2", "mix.mixup is unknown: did you mean data.mix.mixup?"),
    ("dta.mix.mixupp=0.2", "dta.mix.mixupp is unknown: did you mean data.mix.mixup?"),
    ("loss.foo=1", "loss.foo is unknown: loss has name, |label_smoothing|aux_weight"),
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
    ("lookahead.every=99 epochs=20ba", "lookahead.every=99 is more than the run's 20 weight updates"),
    ("schedule.warmup_from=0.5", "schedule.warmup_from=0.5 lies above the peak learning rate 0.05"),
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
