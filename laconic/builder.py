"""Models built by a function of the user's own: "package.module:factory"."""

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
from laconic.errors import MissingPackage, SourceError, UsageError
from laconic.rooms import ROOMS


def source_of(builder: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """How to build the module again. Raises SourceError for arguments that JSON cannot hold."""
    try:
        kept = json.loads(json.dumps(dict(arguments), sort_keys=True, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise SourceError(
            f"the arguments of {builder} must be plain values (numbers, text, lists), to be kept with the model: {error}"
        ) from error
    return {"kind": "builder", "builder": builder, "arguments": kept}


def build(source: Mapping[str, Any]) -> nn.Module:
    """Call the factory. Raises SourceError where there is none, or it fails, or it makes something else."""
    builder, arguments = source["builder"], source["arguments"]
    with working_folder():
        factory = find(builder)
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


def find(builder: str) -> Any:
    """The factory at "package.module:factory". Raises SourceError for an address that leads nowhere."""
    if ":" not in builder:
        raise SourceError(f"the builder {builder!r} is no address; expected package.module:factory")
    try:
        return registry.load(builder)
    except MissingPackage:
        raise
    except UsageError as error:
        raise SourceError(f"{error}. Expected package.module:factory, importable from this folder") from error
    except Exception as error:
        raise SourceError(f"importing {builder} raised {type(error).__name__}: {error}") from error


@contextmanager
def working_folder() -> Iterator[None]:
    """The current folder at the end of the import path: the user's modules are found, and none hides a room of ours.

    The rooms are imported first, since an editable install may find them later than any entry of the path.
    """
    for room in ROOMS:
        importlib.import_module(room)
    here = str(Path.cwd())
    sys.path.append(here)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(here)
