"""Models from a weight file and a builder, a function of the user's own at "package.module:factory".

Also pickled modules and programs of torch.export, which carry code and are loaded only when trusted.
"""

import importlib
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from laconic import registry
from laconic.errors import MissingPackage, SourceError, UntrustedSource, UsageError
from laconic.hashing import digest_file
from laconic.models.state_dicts import find_module, find_state_dict
from laconic.models.weights import fill, read_weights
from laconic.registry import PACKAGES
from laconic.tensor import BATCH, TensorSpec


def load(
    path: Path, builder: str | None, arguments: Mapping[str, Any], *, weights_key: str | None = None, trust: bool
) -> tuple[nn.Module, dict[str, Any]]:
    """Build a module and load a weight file into it; returns the module and its source, from which to build it again.

    weights_key: under which key the file has the weights, where it has several.
    Raises SourceError where the two do not fit, or a file holds weights alone and there is no builder; UntrustedSource
    for a file that only loads by executing what it carries.
    """
    content = read_weights(path, trust=trust)
    if builder is None:
        if (pickled := find_module(content, path, weights_key)) is not None:
            return pickled, {"kind": "pickled module", "sha256": digest_file(path).sha256}
        raise SourceError(
            f"{path} holds weights, and nothing says which module they belong to. Give --builder package.module:factory"
        )
    source = describe_source(builder, arguments)
    module = build(source)
    fill(module, find_state_dict(content, module, path, weights_key), path)
    return module, source if weights_key is None else source | {"weights_key": weights_key}


def load_program(path: Path, *, trust: bool) -> tuple[nn.Module, dict[str, Any], tuple[TensorSpec, ...]]:
    """Return the module in an archive of torch.export, how it is called in a history, and the inputs that it was traced
    with.

    Raises UntrustedSource unless trusted: the archive may hold pickles.
    """
    if not trust:
        raise UntrustedSource(
            f"{path} is an archive of torch.export, which may hold pickles that execute code when they load. Give the "
            f"weights with a --builder, or say --trust if you made this file"
        )
    try:
        program = torch.export.load(path)
    except Exception as error:  # a damaged archive raises whatever its parts do
        raise SourceError(f"{path} does not load ({type(error).__name__}: {error}). Export it again") from error
    module = program.module()
    for name in ("train", "eval"):  # it was exported in one mode, and only refuses to be told so
        module.__dict__.pop(name, None)
    return module, {"kind": "exported program", "sha256": digest_file(path).sha256}, program_inputs(program)


def program_inputs(program: torch.export.ExportedProgram) -> tuple[TensorSpec, ...]:
    """Return the inputs of a program; a free axis is the batch where it comes first, else it keeps torch's name."""
    limits = {str(symbol): interval for symbol, interval in program.range_constraints.items()}
    names: dict[str, str] = {}
    specs = []
    for node in program.graph.nodes:
        if node.op != "placeholder" or node.name not in program.graph_signature.user_inputs:
            continue
        value = node.meta["val"]
        shape: list[int | str] = []
        for place, size in enumerate(value.shape):
            free = not isinstance(size, int)
            shape.append(names.setdefault(str(size), str(size) if place else BATCH) if free else size)
        bounds = {
            names[symbol]: (max(1, int(interval.lower)), int(interval.upper))
            for symbol, interval in limits.items()
            if names.get(symbol) in shape and interval.upper.is_Integer
        }
        dtype = str(value.dtype).removeprefix("torch.")
        specs.append(TensorSpec(name=node.name, dtype=dtype, shape=tuple(shape), bounds=bounds))
    return tuple(specs)


def describe_source(builder: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the source of a module: its builder and arguments. Raises SourceError for arguments that JSON cannot
    hold."""
    try:
        kept = json.loads(json.dumps(dict(arguments), sort_keys=True, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise SourceError(
            f"the arguments of {builder} must be plain values (numbers, text, lists), to be kept: {error}"
        ) from error
    return {"kind": "builder", "builder": builder, "arguments": kept}


def build(source: Mapping[str, Any]) -> nn.Module:
    """Call the builder of a source. Raises SourceError where it is missing, fails, or returns no module."""
    builder, arguments = source["builder"], source["arguments"]
    with working_folder():
        factory = import_factory(builder)
        try:
            with torch.random.fork_rng(devices=[]):
                module = factory(**arguments)
        except Exception as error:
            raise SourceError(
                f"{builder}({', '.join(f'{name}={value!r}' for name, value in arguments.items())}) raised "
                f"{type(error).__name__}: {error}. Expected it to return a module"
            ) from error
    if not isinstance(module, nn.Module):
        raise SourceError(f"{builder} returned a {type(module).__name__}; expected a torch.nn.Module")
    return module


def import_factory(builder: str) -> Any:
    """Import the factory at "package.module:factory". Raises SourceError where there is none."""
    if ":" not in builder:
        raise SourceError(f"the builder {builder!r} is no address; expected package.module:factory")
    try:
        return registry.import_address(builder)
    except MissingPackage:
        raise
    except UsageError as error:
        raise SourceError(f"{error}. Expected package.module:factory, importable from this folder") from error
    except Exception as error:
        raise SourceError(f"importing {builder} raised {type(error).__name__}: {error}") from error


@contextmanager
def working_folder() -> Iterator[None]:
    """Append the current folder to the import path in the body: the user's modules are found, and shadow none of ours.

    Our packages are imported first, since an editable install may find them later than any entry of the path.
    """
    for package in PACKAGES:
        importlib.import_module(package)
    here = str(Path.cwd())
    sys.path.append(here)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(here)
