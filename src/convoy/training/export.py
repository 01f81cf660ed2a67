"""Export for other programs, as ONNX or as a program of torch.export; what is written was run before."""

import io
import json
import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from convoy.errors import ConvoyError
from convoy.files import write_atomically
from convoy.models.libraries import reason
from convoy.training.restore import TrainedRun

ExportFormat = Literal["onnx", "torch-export"]
Notes = dict[str, list[str] | list[float]]
SUFFIXES: dict[str, ExportFormat] = {".onnx": "onnx", ".pt2": "torch-export"}
TOLERANCE = 1e-3
NOTES = "convoy.json"  # the file within a `.pt2` that has classes, mean and standard deviation


def export(run: TrainedRun, form: ExportFormat, path: Path) -> float:
    """Write a trained network (on the CPU) as one file with a free batch size, whole or not at all; run it, and give
    the largest difference between its and the network's outputs on random images, as a part of the largest output.

    Its input is normalized pictures [batch, channels, height, width], its output logits [batch, classes]. Classes, mean
    and standard deviation are in the metadata of an ONNX model, and in `convoy.json` within a `.pt2` file
    (`extra_files` of `torch.export.load`). A ConvoyError says that the extra `onnx` is not installed, or that the
    network cannot be exported.
    """
    if not path.parent.is_dir():
        raise ConvoyError(f"the folder {path.parent} does not exist: make it, or choose another --to")
    if path.is_dir():
        suffix = next(suffix for suffix, known in SUFFIXES.items() if known == form)
        raise ConvoyError(f"{path} is a folder: name a file, e.g. --to {path / f'model{suffix}'}")
    if not os.access(path.parent, os.W_OK):
        raise ConvoyError(f"the folder {path.parent} cannot be written to: choose another --to")
    network_input = run.given
    shape = (2, network_input.channels, network_input.image_size, network_input.image_size)
    images = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    notes: Notes = {"classes": network_input.classes, "mean": list(network_input.mean), "std": list(network_input.std)}
    content, outputs_of = (_onnx if form == "onnx" else _torch_export)(run, images, notes)
    with torch.no_grad():
        wanted = run.network(images)
    difference = float((outputs_of(images) - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12))
    if not difference <= TOLERANCE:
        raise ConvoyError(f"the exported network's outputs are off by {difference:.1e}: nothing was written")
    write_atomically(path, lambda temporary: temporary.write_bytes(content))
    return difference


Exported = tuple[bytes, Callable[[Tensor], Tensor]]  # the file's content, and what it computes when it is read back


def _onnx(run: TrainedRun, images: Tensor, notes: Notes) -> Exported:
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ConvoyError(
            f"ONNX export needs {error.name or 'onnx'}: pip install 'convoy-nn[onnx]', or write a program of "
            "torch.export by --torch-export"
        ) from error
    try:
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns that torchvision's operators are absent
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                run.network,
                (images,),
                dynamo=True,
                verbose=False,
                input_names=["images"],
                output_names=["logits"],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
            )
    except torch.onnx.errors.OnnxExporterError as error:
        raise ConvoyError(f"the network cannot be exported to ONNX: {str(error).partition(chr(10))[0]}") from error
    assert program is not None
    proto = program.model_proto
    onnx.helper.set_model_props(proto, {name: json.dumps(value) for name, value in notes.items()})
    content = proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return content, lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def _torch_export(run: TrainedRun, images: Tensor, notes: Notes) -> Exported:
    file = io.BytesIO()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(
                run.network, (images,), dynamic_shapes=({0: torch.export.Dim("batch")},), strict=False
            )
            torch.export.save(program, file, extra_files={NOTES: json.dumps(notes)})
    except Exception as error:  # torch.export has no class for what it cannot export
        raise ConvoyError(f"the network cannot be exported by torch.export: {reason(error)}") from error
    content = file.getvalue()

    def outputs_of(images: Tensor) -> Tensor:
        with torch.no_grad():
            outputs: Tensor = torch.export.load(io.BytesIO(content)).module()(images)
        return outputs

    return content, outputs_of
