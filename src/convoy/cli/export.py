"""`convoy export`: a trained network for other programs."""

from pathlib import Path

import click

from convoy.cli import options
from convoy.errors import ConvoyError


@click.command(
    "export",
    epilog="""\b
Examples:
  convoy export runs/first --onnx
  convoy export runs/first --onnx --to lenet.onnx
""",
)
@options.run_argument
@click.option("--onnx", is_flag=True, help="Write ONNX.")
@click.option("--to", type=click.Path(path_type=Path), help="The file to write. [default: RUN/model.onnx]")
@options.verbose
def command(run: Path, onnx: bool, to: Path | None) -> None:
    """Write the network of the finished run RUN in another format.

    Its input is normalised pictures [batch, channels, height, width], its output logits [batch, classes]; mean,
    standard deviation and classes are in the file's metadata. (The weights for PyTorch: RUN/weights.safetensors.)
    """
    if not onnx:
        raise ConvoyError("say what to export: --onnx")
    from convoy.training.restore import restore  # with torch, for which no mistake is to wait
    from convoy.training.storage.export import export_onnx

    trained = restore(run)
    path = to or run / "model.onnx"
    difference = export_onnx(trained.model, trained.data, path)
    click.echo(f"wrote {path}; onnxruntime's outputs differ from PyTorch's by {difference:.1e} at most")
