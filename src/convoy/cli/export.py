"""`convoy export`: a trained network for other programs."""

from pathlib import Path

import click

from convoy.cli import options
from convoy.errors import ConvoyError
from convoy.late import waiting_for
from convoy.training.run_directory import RunDirectory


@click.command(
    "export",
    epilog="""\b
Examples:
  convoy export runs/first                             # runs/first/model.onnx
  convoy export runs/first --to lenet.onnx
  convoy export runs/first --checkpoint best           # runs/first/model-best.onnx
  convoy export runs/first --to lenet.pt2              # then: torch.export.load("lenet.pt2").module()(images)
""",
)
@options.run_argument
@click.option("--onnx", is_flag=True, help="Write ONNX: the default, unless --to ends in .pt2.")
@click.option("--torch-export", is_flag=True, help="Write a program of torch.export (.pt2).")
@click.option("--to", type=options.OutputPath(), help="The file to write. [default: RUN/model.onnx or …/model.pt2]")
@options.checkpoint
@options.trust_code
@options.verbose
def command(
    run: Path, onnx: bool, torch_export: bool, to: Path | None, checkpoint: str | None, trust_code: bool
) -> None:
    """Write the network of the run RUN in another format.

    Its input is normalized pictures [batch, channels, height, width], its output logits [batch, classes]; mean,
    standard deviation and classes are in the file's metadata. (The weights for PyTorch: RUN/weights.safetensors.)
    """
    if onnx and torch_export:
        raise ConvoyError("--onnx and --torch-export are two formats: write one after the other")
    suffix = to.suffix.lower() if to is not None else ""
    if suffix == ".pt2" and onnx:
        raise ConvoyError(f"--onnx contradicts --to {to}: name a file that ends in .onnx")
    if suffix == ".onnx" and torch_export:
        raise ConvoyError(f"--torch-export contradicts --to {to}: name a file that ends in .pt2")
    if to is not None and suffix not in (".onnx", ".pt2") and not (onnx or torch_export or to.is_dir()):
        raise ConvoyError(f"--to {to} does not say a format by its ending: end it in .onnx or .pt2, or give --onnx")
    RunDirectory(run).check_trained(checkpoint)
    with waiting_for("loading PyTorch"):
        from convoy.cli.on_devices import load_chosen
        from convoy.comm.ranks import Ranks
        from convoy.training.use import export  # with torch, for which no mistake is to wait

    as_torch = torch_export or suffix == ".pt2"
    name = "model" if checkpoint is None else f"model-{checkpoint}"
    path = to or run / (f"{name}.pt2" if as_torch else f"{name}.onnx")
    difference = export(load_chosen(run, checkpoint, Ranks(), trust_code), "torch-export" if as_torch else "onnx", path)
    reader = "torch.export.load's" if as_torch else "onnxruntime's"
    click.echo(f"wrote {path}; {reader} outputs differ from PyTorch's by {difference:.1e} at most")
