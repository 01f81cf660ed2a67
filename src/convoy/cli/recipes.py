"""`convoy recipes`: the recipes that come with Convoy."""

from dataclasses import asdict

import click

from convoy.cli import options, tables


@click.command(
    "recipes",
    epilog="""\b
Examples:
  convoy recipes
  convoy recipes --keys
  convoy recipes imagenet-90 > mine.yaml     # then: convoy train --recipe mine.yaml
""",
)
@click.argument("name", required=False)
@click.option("--keys", is_flag=True, help="List every key of a recipe with its default and meaning.")
@options.as_json
@options.verbose
def command(name: str | None, keys: bool, as_json: bool) -> None:
    """List the built-in recipes, or print the recipe NAME as YAML to start from.

    What a recipe does not say has its default: --keys lists them.
    """
    from convoy.training.config.schema import describe_keys  # with torch, for which no help is to wait
    from convoy.training.recipe import Recipe, recipe_names, recipe_summary, recipe_text

    if keys:
        tables.show([asdict(key) for key in describe_keys(Recipe)], as_json)
        return
    if name is not None:
        click.echo(recipe_text(name), nl=False)
        return
    tables.show([{"recipe": known, "what": recipe_summary(known)} for known in recipe_names()], as_json)
