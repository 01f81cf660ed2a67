from pathlib import Path

import pytest

from convoy.errors import ConvoyError
from convoy.training.derived import resolve
from convoy.training.recipe import load_recipe

# Changes to the default recipe with a model, and what the sentence must say: the key, the problem, the way out.
WRONG = [
    # names
    ("optimizer.momntum=0.9", ["optimizer.momntum is unknown", "optimizer.momentum?"]),
    ("optimiser.lr=0.1", ["optimiser is unknown", "did you mean optimizer?"]),
    ("lr=0.1", ["lr is unknown", "optimizer.lr?"]),
    ("data.augmnt.flip=true", ["data.augmnt is unknown", "data.augment?"]),
    ("loss.smoothing=0.1", ["loss.label_smoothing?"]),
    ("foo.bar=3", ["foo is unknown", "a recipe has model, data"]),
    ("optimizer.name=adam", ["must be sgd, adamw, lars or lamb", "did you mean adamw?"]),
    ("schedule.name=cosin", ["must be constant, step, cosine or polynomial", "cosine?"]),
    # kinds of values
    ("batch=many", ["batch is many", "a whole number"]),
    ("batch=12.5", ["batch is 12.5", "a whole number"]),
    ("batch='12'", ["batch is 12", "a whole number"]),
    ("seed=true", ["seed is true", "a whole number"]),
    ("optimizer.lr=true", ["optimizer.lr is true", "a number"]),
    ("data.augment.flip=1", ["data.augment.flip is 1", "true or false"]),
    ("channels_last=yes", ["channels_last is yes", "true or false"]),
    ("schedule=cosine", ["schedule is cosine", "a section"]),
    ("optimizer=null", ["optimizer is null", "a section"]),
    ("schedule.warmup_from=high", ["schedule.warmup_from is high", "a number or base_lr"]),
    ("precision=fp8", ["precision is fp8", "fp32, bf16, fp16 or auto"]),
    ("precision=16", ["did you mean fp16?"]),
    ("batch_norm=synced", ["microbatch, sync or local", "did you mean sync?"]),
    ("data.augment.scale=[0.5]", ["data.augment.scale is [0.5]", "longer list"]),
    ("data.mean=[a]", ["data.mean.0 is a", "a number"]),
    # sizes
    ("batch=0", ["batch is 0", "at least 1"]),
    ("seed=-1", ["seed is -1", "at least 0"]),
    ("optimizer.lr=0", ["optimizer.lr is 0", "more than 0"]),
    ("optimizer.lr=.nan", ["optimizer.lr is nan", "a finite number"]),
    ("optimizer.momentum=1", ["optimizer.momentum is 1", "less than 1"]),
    ("loss.label_smoothing=1", ["loss.label_smoothing is 1", "less than 1"]),
    ("ema.decay=1", ["ema.decay is 1", "less than 1"]),
    ("ema.decay=0", ["ema.decay is 0", "more than 0"]),
    ("ema={}", ["ema.decay is missing", "--set ema.decay="]),
    ("clip_norm=0", ["clip_norm is 0", "more than 0"]),
    ("checkpoint.keep=0", ["checkpoint.keep is 0", "at least 1"]),
    ("threads=0", ["threads is 0", "at least 1"]),
    ("microbatches=500", ["microbatches=500", "batch=128"]),
    # durations
    ("epochs=ninety", ["epochs: 'ninety' is not a duration", "90ep"]),
    ("epochs=0", ["epochs: 0ep", "more than 0"]),
    ("epochs=5%", ["epochs: 5%", "share of itself"]),
    ("evaluate_every=1.5ba", ["evaluate_every", "whole number of weight updates"]),
    ("checkpoint.every=0ep", ["checkpoint.every", "more than 0"]),
    ("schedule.warmup=200ep", ["schedule.warmup=200ep is longer", "epochs=90ep"]),
    # options that would be ignored, and options that contradict each other
    ("optimizer.name=adamw optimizer.lr=1e-3 optimizer.momentum=0.9", ["optimizer.momentum would be ignored", "adamw"]),
    ("optimizer.name=adamw optimizer.lr=1e-3 optimizer.nesterov=true", ["optimizer.nesterov would be ignored"]),
    ("optimizer.trust_coefficient=0.01", ["optimizer.trust_coefficient would be ignored", "sgd"]),
    ("optimizer.momentum=0", ["optimizer.nesterov would be ignored without momentum"]),
    ("optimizer.weight_decay=0 optimizer.decay_norm_and_bias=true", ["decay_norm_and_bias would be ignored"]),
    ("optimizer.name=lars optimizer.lr=1 optimizer.decay_norm_and_bias=true", ["lars", "leave it out"]),
    ("optimizer.name=lamb", ["optimizer.lr and optimizer.base_lr are both missing", "square root"]),
    ("optimizer.lr=1 optimizer.base_lr=1", ["are both given", "batch/256"]),
    ("schedule.milestones=[1ep]", ["schedule.milestones would be ignored", "cosine"]),
    ("schedule.name=step", ["schedule.milestones is missing"]),
    ("schedule.name=step schedule.milestones=[]", ["schedule.milestones is empty", "constant"]),
    ("schedule.name=step schedule.milestones=[3ep,2ep]", ["2ep follows 3ep"]),
    ("schedule.name=step schedule.milestones=3ep", ["schedule.milestones is 3ep", "a list"]),
    ("schedule.warmup=0ep schedule.warmup_from=0.1", ["schedule.warmup_from=0.1 would be ignored"]),
    ("optimizer.lr=1 schedule.warmup_from=base_lr", ["schedule.warmup_from=base_lr needs optimizer.base_lr"]),
    ("microbatch=4 microbatches=3", ["microbatch and microbatches are both given"]),
    ("microbatch=null", ["microbatch and microbatches are both null"]),
    ("model.options.num_classes=4", ["model.options.num_classes", "leave it out"]),
    ("model.options.zero_init_residual=true", ["model.zero_init_residual"]),
    ("data.augment.pad=4", ["data.augment: pad=4 would be ignored"]),
    ("data.mean=[0.5]", ["data: mean and std belong together"]),
    # the form of the override itself
    ("lr", ["'lr' is not of the form key=value"]),
    ("=3", ["not of the form key=value"]),
    ("optimizer..lr=3", ["not of the form key=value"]),
    ("batch=[1", ["the value of batch"]),
    ("batch=1 batch=2", ["batch is set twice"]),
    ("batch.size=3", ["batch.size cannot be set", "not a section"]),
]  # fmt: skip


def refusal(name: str, overrides: list[str]) -> str:
    with pytest.raises(ConvoyError) as caught:
        load_recipe(name, overrides)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert "pydantic" not in sentence
    assert "Input should" not in sentence
    return sentence


@pytest.mark.parametrize(("changes", "words"), WRONG, ids=[changes for changes, _ in WRONG])
def test_a_wrong_change_is_one_sentence(changes: str, words: list[str]) -> None:
    sentence = refusal("default", ["model.name=vgg16", *changes.split(" ")])
    assert [word for word in words if word not in sentence] == [], sentence


def test_several_mistakes_are_one_sentence_with_all_keys() -> None:
    sentence = refusal("default", ["model.name=lenet", "batch=0", "precision=fp8", "optimizer.momntum=1"])
    assert sentence.startswith("optimizer.momntum is unknown")
    assert sentence.endswith("(also wrong: batch, precision)")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("imagnet-90", "did you mean imagenet-90?"),
        ("nothing", "there are alexnet-2012, "),
        ("nothing.yaml", "there is no recipe file nothing.yaml"),
        ("no/such/recipe", "there is no recipe file"),
        ("default", "model.name is missing"),
        ("cifar-quick", "data.path is missing"),
    ],
)
def test_a_wrong_recipe_is_one_sentence(name: str, words: str) -> None:
    assert words in refusal(name, [])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: [lenet]\ndata: {path: mnist-mini}", "model is [lenet], but must be a section"),
        ("model: {name: lenet}\ndata: mnist-mini", "data.path is missing"),
        ("model: {name: lenet}\ndata: {path: x}\noptimizer: {lr: 1}", "optimizer.name is missing: it is one of sgd"),
        ("model: {name: lenet}\ndata: {path: x}\n1: 2", "1 is unknown"),
        ("model: {name: lenet}\ndata: {path: x}\nseed: !!binary aGVsbG8=", "write the value itself"),
        ("model: {name: lenet}\nmodel: {name: vgg16}", "line 2: the key model is twice"),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    assert words in refusal(str(tmp_path / "mine.yaml"), [])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["batch=2000"], "the batch of 2000 is larger than the 1000 training samples: lower --batch"),
        (["epochs=20ba", "schedule.warmup=3ep"], "schedule.warmup=3ep is 21 weight updates, but the whole run has 20"),
        (["epochs=7ba", "schedule.warmup=1ep"], "train longer"),
        (["schedule.warmup_from=0.5"], "schedule.warmup_from=0.5 lies above the peak learning rate 0.05"),
        (["schedule.final_lr=0.5"], "schedule.final_lr=0.5 lies above the peak"),
        (["schedule.name=step", "schedule.milestones=[700ba,1ep]"], "do not rise"),
        (["schedule.name=step", "schedule.milestones=[1ep,5ep]", "schedule.warmup=2ep"], "inside schedule.warmup=2ep"),
    ],
)
def test_what_only_the_data_can_tell_is_one_sentence(changes: list[str], words: str) -> None:
    recipe = load_recipe("default", ["model.name=lenet", *changes])
    with pytest.raises(ConvoyError) as caught:
        resolve(recipe, 1000)
    assert words in str(caught.value)
