"""Options that set keys of the recipe: names, types and help are those of the recipe's fields."""

import json
import re
from collections.abc import Callable, Collection
from typing import Any

import click

from convoy import own
from convoy.documents import parse
from convoy.files import expanded
from convoy.recipe.recipe import Recipe
from convoy.recipe.schema import field_at, number_type

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class KeyOption(click.Option):
    """An option that adds `key=value` to the `overrides` of the command's values; `as_yaml` writes the value. Given
    again, the last one counts, as is usual; lists go on."""

    def __init__(self, *arguments: Any, key: str, as_yaml: Callable[[str], str] = str, **settings: Any) -> None:
        self.key, self._as_yaml, is_list = key, as_yaml, as_yaml is patterns_as_yaml
        super().__init__(*arguments, callback=self._note, **settings | ({"multiple": True} if is_list else {}))

    def _note(self, context: click.Context, option: click.Parameter, value: Any) -> Any:
        if self.multiple:
            value = ",".join(dict.fromkeys(value)) or None
        if value is not None:
            context.params.setdefault("overrides", []).append(f"{self.key}={self._as_yaml(value)}")
        return value


def sets(
    key: str, *declarations: str, metavar: str | None = None, text: str = "", default: str = "", **settings: Any
) -> Decorator:
    """The option of a key. Its help is what the field's description says up to a semicolon, unless `text` does, and
    what it says to be so where the key is "not said", unless `default` does."""
    field = field_at(Recipe, key)
    description, _, not_said = (field.description or "").partition("; not said: ")
    sentence = description.partition(";")[0]
    is_name = re.match(r"\w*[0-9]", sentence) is not None  # such as fp32
    text = text or f"{sentence if is_name else sentence[:1].upper() + sentence[1:]}."
    default = default or not_said
    names = declarations or (f"--{key.rpartition('.')[2].replace('_', '-')}",)
    if "type" not in settings and "is_flag" not in settings and "/" not in names[0]:
        settings["type"] = number_type(field.annotation)
    described = f"{text} [default: {default}]" if default else text
    return click.option(*names, cls=KeyOption, key=key, metavar=metavar, help=described, default=None, **settings)


def shares_as_yaml(text: str) -> str:
    """`3,3,2` as YAML."""
    numbers = text.removeprefix("[").removesuffix("]")
    try:
        list(map(float, numbers.split(",")))
    except ValueError as error:
        if text == "auto":
            return text
        raise click.BadParameter(f"{text!r} is neither numbers, such as 3,3,2, nor auto.") from error
    return f"[{numbers}]"


def patterns_as_yaml(text: str) -> str:
    """`layer1.*,layer2.*` as YAML; true and false stay what they are."""
    if text in ("true", "false"):
        return text
    return json.dumps([pattern.strip() for pattern in text.removeprefix("[").removesuffix("]").split(",")])


def weights_as_yaml(text: str) -> str:
    """`a=1,b=3` as YAML; a word stays what it is."""
    if "=" not in text:
        if re.match(r"[-+.\d]", text):
            raise click.BadParameter(f"{text!r} is neither balanced, nor effective, nor weights, such as A=1,B=3.")
        return text
    pairs = [pair.rpartition("=") for pair in text.split(",")]
    return json.dumps({name.strip(): parse(weight, f"the weight of {name}") for name, _, weight in pairs})


microbatches = sets("microbatches", metavar="V")
batch_norm = sets("batch_norm", metavar="MODE")
precision = sets("precision", metavar="TYPE")
channels_last = sets("channels_last", "--channels-last/--channels-first")
recompute = sets("recompute", metavar="[PATTERN,…]", is_flag=False, flag_value="true", as_yaml=patterns_as_yaml)
freeze = sets(
    "optimizer.freeze",
    metavar="LAYER,…",
    text="Layers not to train: conv1,layer?, or trunk (all but the head); trunk:3ep until then.",
    as_yaml=patterns_as_yaml,
)
schedule = sets("parallel.schedule", metavar="ORDER")
cores_per_device = sets("parallel.cores_per_device", metavar="N")


def check_own(recipe: Recipe, file: str | None, typed: Collection[str]) -> None:
    """Refuse code from elsewhere that a file names; what the command line names is the user's will."""
    for key, name in {"model.name": recipe.model.name, **recipe.own_code()}.items():
        if file is not None and not any(f"{key}.".startswith(f"{option}.") for option in typed):
            own.check_own(name, expanded(file), "network" if key == "model.name" else "function")
