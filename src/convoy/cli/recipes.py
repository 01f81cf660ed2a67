"""`convoy recipes`: the recipes that come with Convoy."""

import click

from convoy.training import load_recipe, recipe_names
from convoy.training.recipe import recipe_summary, to_yaml


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
    """List the built-in recipes, or print the recipe NAME with every key, as YAML to start from."""
    if name is not None:
        click.echo(to_yaml(load_recipe(name)), nl=False)
        return
    width = max(map(len, recipe_names()))
    for known in recipe_names():
        click.echo(f"{known:{width}}  {recipe_summary(known)}")
