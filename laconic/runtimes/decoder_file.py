"""The file of a decoder with a cache: the names of its inputs and outputs, and the file of its encoder."""

from collections.abc import Sequence
from pathlib import Path

from laconic.errors import RuntimeFailure
from laconic.runtimes.onnx_file import GraphInput, read_inputs

LOGITS, CROSS, PAST, PRESENT = "logits", "cross.", "past.", "present."
VALUE_GROUP = 32
"""Numbers of a value in 4 bits that share a scale."""


def encoder_of(model: Path) -> Path:
    """Return the path of the encoder that belongs to a model file, if that is a decoder."""
    return model.with_name(f"{model.stem}.encoder.onnx")


def gguf_of(model: Path) -> Path:
    """Return the path of the file for llama.cpp that belongs to a model file."""
    return model.with_suffix(".gguf")


def cross_name(index: int) -> str:
    """Return the decoder's input for an output of the encoder."""
    return f"{CROSS}{index}"


def past_name(index: int) -> str:
    """Return the decoder's input for the keys or values of earlier tokens."""
    return f"{PAST}{index}"


def present_name(index: int) -> str:
    """Return the decoder's output for the same with those of the new tokens."""
    return f"{PRESENT}{index}"


def rounded_name(index: int, bits: int = 8) -> str:
    """Return the tensor of the keys or values of new tokens that are rounded to so many bits."""
    return f"rounded.{index}" if bits == 8 else f"rounded.{index}.int{bits}"


def find_value_group(width: int) -> int:
    """Return how many numbers of a head share a scale where values are in 4 bits: all of a head that VALUE_GROUP does
    not divide."""
    return width if width % VALUE_GROUP else VALUE_GROUP


def read_file_inputs(model: Path) -> list[GraphInput]:
    """Read the inputs of a model file. Raises RuntimeFailure for one that does not read."""
    try:
        return read_inputs(model)
    except (OSError, ValueError) as error:
        raise RuntimeFailure(f"{model} does not read: {error}") from error


def find_cache(inputs: Sequence[GraphInput], tokens: str, model: Path) -> list[tuple[int, int]]:
    """Find the heads and the width of a head of each part of a decoder's cache, by its inputs. tokens: the name of the
    input of tokens. Raises RuntimeFailure for a file without them."""
    shapes = {each.name: each.shape for each in inputs}
    layers = [shapes[name] for name in map(past_name, range(len(shapes))) if name in shapes]
    cache = [(int(shape[1]), int(shape[3])) for shape in layers if len(shape) == 4]
    if not layers or len(cache) < len(layers) or tokens not in shapes:
        raise RuntimeFailure(f"{model} is no decoder with a cache. Compress the model again")
    return cache


def is_language_model(model: Path) -> bool:
    """Return whether a file is that of a language model: a decoder with a cache, without an encoder."""
    if model.suffix != ".onnx":
        return False
    names = {each.name for each in read_file_inputs(model)}
    return {past_name(0), "position_ids"} <= names
