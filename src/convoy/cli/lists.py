"""`convoy models` and `convoy recipes`: the networks and the recipes that come with Convoy."""

import sys
from dataclasses import asdict

import click

from convoy.cli import options
from convoy.errors import ConvoyError
from convoy.terminal import did_you_mean

USUAL_SHAPE = (3, 224, 224)


@options.verb(
    "models",
    """
  convoy models
  convoy models resnet
  convoy models timm:resnet26d --json
""",
)
@click.argument("pattern", required=False, default="")
@options.as_json
def models(pattern: str, as_json: bool) -> None:
    """List the networks, or those whose name contains PATTERN, with parameters and FLOPs.

    FLOPs are those of one image's forward pass; a multiply-add counts as two.
    """
    from convoy import models as networks  # with torch, for which no help is to wait

    if ":" in pattern:
        infos = [networks.describe(pattern)]
    else:
        all_infos = networks.list_models()
        infos = [info for info in all_infos if pattern.lower() in info.name.lower()]
        if not infos:
            hint = did_you_mean(pattern, [info.name for info in all_infos], otherwise="convoy models lists all")
            raise ConvoyError(f"no model's name contains {pattern!r}{hint}")
    rows = []
    for info in infos:
        shape = info.input_shape or USUAL_SHAPE
        counts = networks.count(info.name, shape)
        row = {"name": info.name, "parameters": counts.parameters, "flops": counts.flops}
        rows.append(row | {"input": "×".join(map(str, shape)), "network": info.title})
    formats = {"flops": lambda flops: f"{flops / 1e9:.3g} G"}
    options.show(rows, as_json, right=("parameters", "flops", "input"), formats=formats)


@options.verb(
    "recipes",
    """
  convoy recipes
  convoy recipes --keys
  convoy recipes --keys | grep warmup        # a line a key: key, type, default, description, tabs between them
  convoy recipes imagenet-90 > mine.yaml     # then: convoy train --recipe mine.yaml
""",
)
@click.argument("name", required=False)
@click.option("--keys", is_flag=True, help="List every key of a recipe: type, default, description.")
@options.as_json
def recipes(name: str | None, keys: bool, as_json: bool) -> None:
    """List the built-in recipes, or print the recipe NAME as YAML to start from.

    What a recipe does not say has its default: --keys lists them.
    """
    from convoy.recipe.recipe import Recipe, recipe_names, recipe_summary, recipe_text
    from convoy.recipe.schema import describe_keys  # with torch, for which no help is to wait

    if keys:
        items = describe_keys(Recipe)
        if as_json or sys.stdout.isatty():
            options.show(list(map(asdict, items)), as_json)
        else:
            click.echo("\n".join("\t".join(asdict(key).values()) for key in items))
        return
    if name is not None:
        click.echo(recipe_text(name), nl=False)
        return
    options.show([{"recipe": recipe, "what": recipe_summary(recipe)} for recipe in recipe_names()], as_json)
