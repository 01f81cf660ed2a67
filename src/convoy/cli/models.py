"""`convoy models`: the networks that come with Convoy."""

import difflib

import click

from convoy.cli import options
from convoy.errors import ConvoyError

USUAL_SHAPE = (3, 224, 224)


@click.command(
    "models",
    epilog="""\b
Examples:
  convoy models
  convoy models resnet
  convoy models timm:resnet26d --json
""",
)
@click.argument("pattern", required=False, default="")
@options.as_json
@options.verbose
def command(pattern: str, as_json: bool) -> None:
    """List the networks, or those whose name contains PATTERN, with parameters and FLOPs.

    FLOPs are those of one image's forward pass; a multiply-add counts as two.
    """
    from convoy import models  # with torch, for which no help is to wait

    if ":" in pattern:
        infos = [models.describe(pattern)]
    else:
        all_infos = models.list_models()
        infos = [info for info in all_infos if pattern.lower() in info.name.lower()]
        if not infos:
            close = difflib.get_close_matches(pattern, [info.name for info in all_infos], n=3)
            hint = f"did you mean {' or '.join(close)}?" if close else "convoy models lists all"
            raise ConvoyError(f"no model's name contains {pattern!r}: {hint}")
    rows = []
    for info in infos:
        shape = info.input_shape or USUAL_SHAPE
        counts = models.count(info.name, shape)
        row = {
            "name": info.name,
            "parameters": counts.parameters,
            "flops": counts.flops,
            "input": "×".join(map(str, shape)),
            "network": info.title,
        }
        if not as_json:
            row["flops"] = f"{counts.flops / 1e9:.3g} G"
        rows.append(row)
    options.show(rows, as_json, right=("parameters", "flops", "input"))
