"""Weight files: read without executing code; tied weights are saved once."""

import hashlib
import json
import pickle
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from laconic.arrays import Array
from laconic.errors import SourceError, UntrustedSource
from laconic.hashing import hash_of

COUNTER = "num_batches_tracked"
"""A counter of batch normalization, unused after training, which other frameworks do not save."""
SHOWN = 3


def read_weights(path: Path, *, trust: bool = False) -> Any:
    """Read a weight file: what was saved, as a state dict or mappings around it, or a whole module where `trust` lets a
    pickle execute its code.

    Raises SourceError for a file that is missing, damaged or of another kind, UntrustedSource for one that only reads
    by executing what it carries.
    """
    if not path.is_file():
        raise SourceError(f"{path} is missing; expected a file of weights (.safetensors, .pt, .pth or .bin)")
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    return _read_pickle(path, trust)


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file. Raises SourceError for one that is truncated or of another format."""
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise SourceError(
            f"{path} does not read as safetensors ({error}): it is cut short, or of another kind. Copy it again"
        ) from error


def _read_pickle(path: Path, trust: bool) -> Any:
    if is_torchscript(path):
        raise SourceError(f"{path} is a TorchScript archive; expected a state dict. Save it with model.state_dict()")
    if not is_pickle(path):
        raise SourceError(
            f"{path} is no file of weights; expected a state dict saved by torch.save, or .safetensors under that name"
        )
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if not trust:
            raise UntrustedSource(
                f"{path} holds more than tensors, and loading it would execute code that it carries. Save the "
                f"state dict alone (torch.save(model.state_dict(), ...)), or say --trust if you made this file"
            ) from error
    except (RuntimeError, EOFError, OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise SourceError(
            f"{path} does not read ({_first_line(error)}): it is cut short or damaged. Copy it again"
        ) from error
    try:
        return torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:
        raise SourceError(
            f"{path} does not load even when trusted ({type(error).__name__}: {_first_line(error)}). "
            f"Its classes must be importable here"
        ) from error


def is_torchscript(path: Path) -> bool:
    """Return whether a file is a TorchScript archive."""
    return any("/code/" in name for name in _archive_names(path))


def is_program(path: Path) -> bool:
    """Return whether a file is an archive of torch.export."""
    entries = _archive_names(path)
    return path.suffix == ".pt2" or any(
        name.endswith(("archive_format", "serialized_exported_program.json")) for name in entries
    )


def is_pickle(path: Path) -> bool:
    """Return whether a file can be a pickle of torch: a zip archive, even if cut short, or the old format."""
    with path.open("rb") as file:
        start = file.read(2)
    return zipfile.is_zipfile(path) or start == b"PK" or start[:1] == b"\x80"


def _archive_names(path: Path) -> list[str]:
    if not path.is_file() or not zipfile.is_zipfile(path):
        return []
    with zipfile.ZipFile(path) as archive:
        return archive.namelist()


def fill(module: nn.Module, tensors: Mapping[str, Tensor], origin: Path, *, assign: bool = False) -> None:
    """Copy the weights into the module, each cast to the dtype that is there. assign: put them in the place of those
    that are there instead, as they are.

    Raises SourceError naming the first few that are missing, left over or of another shape.
    """
    if faults := describe_faults(module.state_dict(keep_vars=True), tensors):
        raise SourceError(
            f"the weights in {origin} do not fit the module: {faults}. Give the --builder, and the arguments, that "
            f"these weights were trained with"
        )
    module.load_state_dict(dict(tensors), strict=False, assign=assign)


def count_faults(state: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> int:
    """Count the weights that are missing for a module's state dict, left over, or of another shape."""
    return sum(map(len, list_faults(state, tensors).values()))


def describe_faults(state: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> str:
    """Name the first few weights that are missing, left over or of another shape; empty where all fit."""
    return "; ".join(
        f"{len(listed)} {what} ({', '.join(listed[:SHOWN])}{', ...' if len(listed) > SHOWN else ''})"
        for what, listed in list_faults(state, tensors).items()
        if listed
    )


def list_faults(state: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """List the weights that do not fit a module, by what is wrong. state: its state dict, of parameters themselves."""
    names = {id(value): name for name, value in state.items()}
    present = {names[id(value)] for name, value in state.items() if name in tensors}
    missing = [
        name
        for name, value in state.items()
        if name not in tensors and names[id(value)] not in present and not name.endswith(COUNTER)
    ]
    misfits = [
        f"{name} is {list(tensors[name].shape)}, expected {list(value.shape)}"
        for name, value in state.items()
        if name in tensors and tensors[name].shape != value.shape
    ]
    return {
        "missing": missing,
        "unexpected": [name for name in tensors if name not in state],
        "of another shape": misfits,
    }


def write_weights(module: nn.Module, path: Path) -> dict[str, str]:
    """Save the module's weights, a tied one once. Returns the name it is saved under for each name that is not."""
    seen: dict[Any, str] = {}
    tied: dict[str, str] = {}
    tensors: dict[str, Tensor] = {}
    for name, tensor in sorted(module.state_dict().items()):
        storage = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        if tensor.numel() and storage in seen:
            tied[name] = seen[storage]
            continue
        seen[storage] = name
        # Views of one storage are no tie, and safetensors refuses them: each is written as a tensor of its own.
        tensors[name] = tensor.contiguous().clone()
    save_file(tensors, path)
    return tied


def tie(module: nn.Module, tied: Mapping[str, str]) -> None:
    """Tie weights again. tied: by name, the name that the weight was saved under."""
    for name, origin in tied.items():
        source, _, kept = origin.rpartition(".")
        target, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(target), leaf, getattr(module.get_submodule(source), kept))


def check_finite(module: nn.Module, path: Path) -> None:
    """Raise SourceError for weights that are no numbers, with which nothing can be compared."""
    for name, parameter in module.named_parameters():
        if not torch.isfinite(parameter).all():
            raise SourceError(
                f"the weight {name} in {path} has values that are no numbers (NaN or infinite): its training diverged, "
                f"or the file is damaged. Give a checkpoint from before"
            )


def fingerprint(module: nn.Module) -> str:
    """Return the digest of the state dict: names, dtypes, shapes and values."""
    parts = []
    for name, tensor in sorted(module.state_dict().items()):
        values = hashlib.sha256(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()).hexdigest()
        parts.append([name, str(tensor.dtype), list(tensor.shape), values])
    return hash_of(parts)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


PART = 2**20
"""Bytes that are read at once: a multiple of the size of each dtype."""
BF16_EXPONENT = 0x7F80
FLOATS: Mapping[str, tuple[str, Callable[[Array], Any]]] = {
    "F64": ("<f8", np.isfinite),
    "F32": ("<f4", np.isfinite),
    "F16": ("<f2", np.isfinite),
    "BF16": ("<u2", lambda bits: (bits & BF16_EXPONENT) != BF16_EXPONENT),
}
"""Of each dtype of safetensors that has values which are no numbers, the numpy dtype of its bytes, and what tells which
are numbers. Those in eight bits have no infinity, and are no weights that are trained."""


class WeightScan(NamedTuple):
    """What reading weight files tells. digest: of the tensors' names, dtypes, shapes and values, however they are
    spread over files. finite: whether all values are numbers."""

    digest: str
    finite: bool


def scan_weights(files: Sequence[Path]) -> WeightScan:
    """Read all tensors of safetensors files that are known to read.

    Through the module, reading would leave its weights resident where they are mapped from the file: 91 MB of MiniLM.
    """
    entries: list[list[Any]] = []
    finite = True
    for path in files:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                begin, end = entry["data_offsets"]
                file.seek(8 + size + begin)
                digest, is_finite = scan_values(file, end - begin, str(entry["dtype"]))
                entries.append([name, entry["dtype"], entry["shape"], digest])
                finite &= is_finite
    return WeightScan(hash_of(sorted(entries)), finite)


def scan_values(file: BinaryIO, size: int, dtype: str) -> WeightScan:
    """Read the next `size` bytes, values of a dtype."""
    digest, finite = hashlib.sha256(), True
    for start in range(0, size, PART):
        part = file.read(min(PART, size - start))
        digest.update(part)
        if dtype in FLOATS:
            kind, are_finite = FLOATS[dtype]
            finite &= bool(are_finite(np.frombuffer(part, kind)).all())
    return WeightScan(digest.hexdigest(), finite)
