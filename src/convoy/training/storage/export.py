"""Export to ONNX, checked by running the file."""

import json
import logging
import os
import warnings
from pathlib import Path

import torch
from torch import nn

from convoy.data import DataSet
from convoy.errors import ConvoyError
from convoy.files import write_atomically

TOLERANCE = 1e-3


def export_onnx(model: nn.Module, data: DataSet, path: Path) -> float:
    """Write a network as one ONNX file with a free batch size, and run it on onnxruntime.

    Args:
        model: the network, on the CPU.
        data: what it was trained on: shape of the images, classes, mean and standard deviation go with the file.
        path: the file; written whole or not at all.

    Returns:
        The largest difference between onnxruntime's and PyTorch's outputs on random images, as a part of the largest.

    Raises:
        ConvoyError: the extra `onnx` is not installed, or the network cannot be exported.
    """
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ConvoyError(f"ONNX export needs {error.name or 'onnx'}: pip install 'convoy-nn[onnx]'") from error
    if not path.parent.is_dir():
        raise ConvoyError(f"the folder {path.parent} does not exist: make it, or choose another --to")
    if path.is_dir():
        raise ConvoyError(f"{path} is a folder: name a file, e.g. --to {path / 'model.onnx'}")
    if not os.access(path.parent, os.W_OK):
        raise ConvoyError(f"the folder {path.parent} cannot be written to: choose another --to")
    model = model.eval()
    images = torch.rand(2, data.channels, data.image_size, data.image_size, generator=torch.Generator().manual_seed(0))
    try:
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns that torchvision's operators are absent
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                model,
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
    notes = {"classes": data.classes, "mean": list(data.mean), "std": list(data.std)}
    onnx.helper.set_model_props(proto, {name: json.dumps(value) for name, value in notes.items()})
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    with torch.no_grad():
        wanted = model(images)
    given = torch.from_numpy(session.run(None, {"images": images.numpy()})[0])
    difference = float((given - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12))
    if difference > TOLERANCE:
        raise ConvoyError(f"the exported network's outputs are off by {difference:.1e}: nothing was written")
    write_atomically(path, lambda temporary: onnx.save(proto, temporary))
    return difference
