"""`convoy data`: what a data set holds, before training on it; and packs, which load faster."""

import difflib
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from convoy.cli import options
from convoy.cli.options import LazyGroup
from convoy.errors import ConvoyError
from convoy.files import MNIST_MINI, existing
from convoy.progress import ConsoleReporter
from convoy.terminal import Console, waiting_for
from convoy.units import size

if TYPE_CHECKING:
    from convoy.data.packed import Pack

_OTHERWISE = f"name a file or folder, or {MNIST_MINI}"
_PADDED = 1.2  # how many times as many bytes as its pictures a pack may take before that is said
VERBS = {
    "show": ("convoy.cli.data:show", "Say what is in a data set, and check its pictures."),
    "pack": ("convoy.cli.data:pack", "Write a data set as shards that load faster."),
    "verify": ("convoy.cli.data:verify", "Read a whole pack, and name what is damaged."),
    "unpack": ("convoy.cli.data:unpack", "Write a pack as folders of pictures."),
}


class _DataGroup(LazyGroup):
    """`convoy data PATH` is `convoy data show PATH`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        first = args[0] if args else ""
        is_mistyped = bool(difflib.get_close_matches(first, self.verbs, 1)) and not Path(first).exists()
        if first not in (*self.verbs, "-h", "--help") and not is_mistyped:
            args = ["show", *args]
        return super().parse_args(ctx, args)


@click.command(
    "data",
    cls=_DataGroup,
    verbs=VERBS,
    epilog="""\b
Examples:
  convoy data mnist-mini
  convoy data photos/ --check
  convoy data pack photos/ packed/ --short-side 256
  convoy data verify packed/
  convoy train resnet50 --data packed/
""",
)
def command() -> None:
    """Say what is in a data set (convoy data PATH), or pack it so that it loads faster."""


@options.verb(
    "show",
    """
  convoy data mnist-mini
  convoy data photos/ --check
""",
)
@click.argument("path", cls=options.DataArgument)
@click.option("--check", is_flag=True, help="Read every picture and name those that cannot be read.")
@options.settings
@options.as_json
def show(path: str, check: bool, settings: tuple[str, ...], as_json: bool) -> int:
    """Say what is in the data set PATH: format, splits, classes, size of the network's input.

    With --check every picture is decoded, and those that cannot be are named; the exit status is then 1.
    """
    folder = existing(path, _OTHERWISE)
    with waiting_for("loading PyTorch"):
        from convoy.data.dataset import open_data  # with torch, for which no mistake is to wait
        from convoy.data.decode import BadImage
        from convoy.data.packed import Pack
        from convoy.recipe.recipe import load_recipe

    one_by_one = ["data.bad_images=skip"]  # below
    recipe = load_recipe("default", ["model.name=lenet", f"data.path={path}", *one_by_one, *settings])
    data = open_data(recipe.data, task=recipe.task)
    form = str(Pack.open(folder).options) if data.format == "pack" else ""
    outputs = list(data.classes) if as_json else ", ".join(data.classes)  # of regression
    rows = []
    bad: list[str] = []
    splits = {"train": data.train, data.split: data.test, **({"test": data.final} if data.final else {})}
    for split, source in splits.items():
        row = {
            "data": data.name,
            "format": data.format,
            "split": split,
            "images": len(source),
            **({"outputs": outputs} if data.task == "regression" else {"classes": len(data.classes)}),
            "input": f"{data.channels}×{data.image_size}×{data.image_size}",
        }
        if check:
            unreadable = []
            with _reporter(as_json or not sys.stderr.isatty()) as reporter:
                for sample in range(len(source)):
                    try:
                        source.load(sample)
                    except BadImage as error:
                        unreadable.append(str(error))
                    reporter.prepare(f"reading {split}", sample + 1, len(source))
            row["not readable"] = len(unreadable)
            bad += unreadable
        rows.append(row | ({"stored": form} if form and as_json else {}))
    options.show(rows, as_json, right=("images", "classes", "not readable"))
    if form and not as_json:
        click.echo(f"stored: {form}")
    for sentence in (*data.notes, *bad):
        click.echo(sentence, err=True)
    return 1 if bad else 0


@options.verb(
    "pack",
    """
  convoy data pack /data/imagenet /fast/imagenet-256 --short-side 256
  convoy data pack photos/ photos-raw/ --short-side 256 --raw
  convoy data pack train.parquet packed/

A pack is WebDataset tars with an index. Training on it sees the samples in the order of the original. Interrupted, the
same command goes on where it stopped.
""",
)
@click.argument("source", cls=options.DataArgument)
@click.argument("dest", type=options.OutputPath())
@click.option(
    "--short-side",
    metavar="PIXELS",
    type=click.IntRange(8, 8192),
    help="Make larger pictures that small; stored as JPEG, or as pixels with --raw.",
)
@click.option("--raw", is_flag=True, help="Store pixels: several times the bytes, and no decoding.")
@click.option(
    "--quality", type=click.IntRange(1, 95), default=90, show_default=True, help="Of JPEG where pictures are resized."
)
@click.option("--processes", metavar="N", type=click.IntRange(1, 1024), help="[default: the cores that there are]")
@options.settings
@options.as_json
def pack(source: str, dest: Path, short_side: int | None, raw: bool, quality: int, as_json: bool, **values: Any) -> int:
    """Write the data set SOURCE as a pack to the folder DEST: shards that are read sequentially, with an index.

    Without options the files of the pictures stay as they are, and so does every pixel. A picture that cannot be read
    is named, and ends the command.
    """
    source_of_quality = click.get_current_context().get_parameter_source("quality")
    if source_of_quality is not click.core.ParameterSource.DEFAULT:
        if raw:
            raise ConvoyError("--quality is of JPEG, and --raw stores none: leave one of them out")
        if short_side is None:
            raise ConvoyError("--quality is of pictures that --short-side makes smaller: give both, or leave it out")
    path = existing(source, _OTHERWISE)
    if source != MNIST_MINI and path.resolve() in (dest.resolve(), *dest.resolve().parents):
        raise ConvoyError(f"{dest} lies in the data set itself: name a folder beside it for the pack")
    from convoy.data.dataset import open_files
    from convoy.data.pack import pack as write
    from convoy.data.packed import Pack, PackOptions
    from convoy.recipe.recipe import load_recipe
    from convoy.resources import own_share

    with _reporter(as_json) as reporter:
        recipe = load_recipe("default", ["model.name=lenet", f"data.path={source}", *values["settings"]])
        kind, contents = open_files(recipe.data, reporter.prepare, task=recipe.task)
        form = PackOptions(short_side, raw, quality)
        if kind == "pack":
            packed = Pack.open(path)
            kind, form = packed.format, packed.options if form == PackOptions() else form
        cores = values["processes"] or max(int(own_share()), 1)
        tell = partial(click.echo, err=True)
        for note in contents.notes if kind != "pack" else ():
            tell(note)
        statistics = write(kind, contents, dest, form, reporter.prepare, cores, tell)
    rows: list[dict[str, Any]] = []
    for split, sums in statistics.items():
        row: dict[str, Any] = {"split": split, "images": sums.images}
        sizes = ({"original": sums.original_bytes} if sums.original_bytes else {}) | {"stored": sums.stored_bytes}
        row |= {f"{name}_bytes" if as_json else name: number for name, number in sizes.items()}
        rows.append(row | dict(zip(("mean", "std"), sums.moments, strict=True)))
    if as_json:
        options.show([{"pack": str(dest)} | row for row in rows], as_json)
        return 0
    words = {"original": size, "stored": size}
    numbers = dict.fromkeys(("mean", "std"), lambda numbers: " ".join(f"{number:.3f}" for number in numbers))
    options.show(rows, right=("images", *words), formats={**words, **numbers})
    on_disk = sum(file.stat().st_size for file in dest.iterdir())
    if on_disk > _PADDED * sum(sums.stored_bytes for sums in statistics.values()):
        click.echo(f"{dest} takes {size(on_disk)} on disk: tars add some 2 kB to every picture")
    return 0


@options.verb("verify", "\n  convoy data verify packed/\n")
@click.argument("path", metavar="PACK", type=options.OutputPath())
@options.as_json
def verify(path: Path, as_json: bool) -> int:
    """Read every picture of PACK and compare it with its checksum.

    What differs, and shards that are missing or of another size, is named; the exit status is then 1.
    """
    pack_ = _opened(path, to_verify=True)
    from convoy.data.packed import damaged

    with _reporter(as_json) as reporter:
        sentences = list(damaged(pack_, reporter.prepare))
    images = sum(split.images for split in pack_.statistics.values())
    row = {"pack": str(path), "of": pack_.name, "stored": str(pack_.options), "images": images}
    options.show([row | {"damaged": len(sentences)}], as_json, right=("images", "damaged"))
    for sentence in sentences:
        click.echo(sentence, err=True)
    return 1 if sentences else 0


@options.verb("unpack", "\n  convoy data unpack packed/ photos/\n")
@click.argument("path", metavar="PACK", type=options.OutputPath())
@click.argument("dest", type=options.OutputPath())
def unpack(path: Path, dest: Path) -> int:
    """Write the pictures of PACK to the folder DEST: a folder for each class, below train and test where it has both.

    Pictures are checked against their checksums. What a pack keeps raw is written as PPM.
    """
    pack_ = _opened(path)
    from convoy.data.packed import unpack as write

    with _reporter(False) as reporter:
        number = write(pack_, dest, reporter.prepare)
    click.echo(f"{number:,} pictures of {len(pack_.classes):,} classes are in {dest}")
    return 0


def _opened(path: Path, to_verify: bool = False) -> "Pack":
    from convoy.data.packed import Pack, is_pack

    existing(str(path), "name a folder that convoy data pack has written")
    if not is_pack(path):
        raise ConvoyError(f"{path} is no pack: convoy data pack SOURCE DEST writes one")
    return Pack.open(path, to_verify=to_verify)


def _reporter(quiet: bool) -> ConsoleReporter:
    """Shows long work as a bar on a terminal, and as a line now and then elsewhere."""
    return ConsoleReporter(Console(stderr=True, highlight=False, quiet=quiet))
