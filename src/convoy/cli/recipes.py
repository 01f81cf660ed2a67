"""`convoy recipes`: the recipes that come with Convoy."""

import click

from convoy.training import recipe_names
from convoy.training.recipe import recipe_summary, recipe_text


@click.command(
    "recipes",
    epilog="""\b
Examples:
  convoy recipes
  convoy recipes imagenet-90 > mine.yaml     # then: convoy train --recipe mine.yaml
""",
)
@click.argument("name", required=False)
def command(name: str | None) -> None:
    """List the built-in recipes, or print the recipe NAME as YAML to start from.

    What a recipe does not say is as in the recipe default; docs/recipes.md has every key.
    """
    if name is not None:
        click.echo(recipe_text(name), nl=False)
        return
    width = max(map(len, recipe_names()))
    for known in recipe_names():
        click.echo(f"{known:{width}}  {recipe_summary(known)}")
