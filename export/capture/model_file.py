"""Writing an ONNX model to disk."""

from pathlib import Path

import onnx

LARGEST = 1_800_000_000
"""The most bytes of weights in an ONNX file itself; the limit of protobuf is 2 GiB."""


def save_model(model: onnx.ModelProto, path: Path) -> None:
    """Write a model to `path`; large weights to a file beside it with the suffix `.data`."""
    size = sum(len(tensor.raw_data) for tensor in model.graph.initializer)  # ByteSize() would serialize the model
    onnx.save(model, path, save_as_external_data=size > LARGEST, location=path.with_suffix(".data").name)
