"""`convoy data`: what a data set holds, before training on it."""

import sys

import click

from convoy.cli import options
from convoy.files import existing
from convoy.late import waiting_for


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
    """Say what is in the data set PATH: format, splits, classes, size of the network's input.

    With --check every picture is decoded, and those that cannot be are named; the exit status is then 1.
    """
    existing(path)
    with waiting_for("loading PyTorch"):
        from convoy.data import BadImage, open_data  # with torch, for which no mistake is to wait
        from convoy.training import load_recipe

    settings = ["model.name=lenet", f"data.path={path}", "data.bad_images=skip"]  # one after the other, below
    data = open_data(load_recipe("default", settings).data)
    rows = []
    bad: list[str] = []
    known = 0
    for split, source in (("train", data.train), ("test", data.test)):
        row = {
            "data": data.name,
            "format": data.format,
            "split": split,
            "images": len(source),
            "classes": len(data.classes),
            "input": f"{data.channels}×{data.image_size}×{data.image_size}",
        }
        if check:
            unreadable = []
            hidden = as_json or not sys.stderr.isatty()
            with click.progressbar(
                range(len(source)), label=f"reading {split}", hidden=hidden, file=sys.stderr
            ) as samples:
                for sample in samples:
                    try:
                        source.load(sample)
                    except BadImage as error:
                        unreadable.append(str(error))
            row["not readable"] = len(unreadable)
            bad += unreadable
        else:
            known += len(getattr(source, "bad", ()))
        rows.append(row)
    options.show(rows, as_json, right=("images", "classes", "not readable"))
    for sentence in bad:
        click.echo(sentence, err=True)
    if known:
        click.echo(f"{known:,} of the pictures cannot be read: --check names them", err=True)
    return 1 if bad else 0
