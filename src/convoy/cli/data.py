"""`convoy data`: what a data set holds, before training on it."""

import click

from convoy.cli import options, tables


@click.command(
    "data",
    epilog="""\b
Examples:
  convoy data mnist-mini
  convoy data photos/ --check
""",
)
@click.argument("path")
@click.option("--check", is_flag=True, help="Read every picture and name those that cannot be read.")
@options.as_json
@options.verbose
def command(path: str, check: bool, as_json: bool) -> int:
    """Say what is in the data set PATH: format, splits, classes, size of the pictures.

    With --check the exit status is 1 if any picture cannot be read.
    """
    from convoy.data import BadImage, open_data  # with torch, for which no help is to wait
    from convoy.training import load_recipe

    data = open_data(load_recipe("default", ["model.name=lenet", f"data.path={path}"]).data)
    rows = []
    bad: list[str] = []
    for split, source in (("train", data.train), ("test", data.test)):
        row = {
            "data": data.name,
            "split": split,
            "images": len(source),
            "classes": len(data.classes),
            "input": f"{data.channels}×{data.image_size}×{data.image_size}",
        }
        if check:
            unreadable = []
            with click.progressbar(range(len(source)), label=f"reading {split}", hidden=as_json) as samples:
                for sample in samples:
                    try:
                        source.load(sample)
                    except BadImage as error:
                        unreadable.append(str(error))
            row["not readable"] = len(unreadable)
            bad += unreadable
        rows.append(row)
    tables.show(rows, as_json, right=("images", "classes", "not readable"))
    for sentence in bad:
        click.echo(sentence, err=True)
    return 1 if bad else 0
