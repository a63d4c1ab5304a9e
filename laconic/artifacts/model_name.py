"""Names of models, given before an artifact as NAME=ARTIFACT, or taken from its folder."""

import os
import re
from pathlib import Path

from laconic.errors import UsageError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""A name that can be a part of a path, of a metric's label and of a folder's name."""
RULE = "A name has up to 128 letters, digits, '.', '_' and '-', and begins with a letter or a digit"
SHOWN = 40
"""The most characters of a bad name in a message."""
SUFFIX = ".laconic"
"""What the name of an artifact's folder may end with, and the name of the model leaves out."""


def make_name(path: Path) -> str:
    """Make the name of the model in a folder: the folder's own without `.laconic`.

    No other suffix is left out: `bge-v1.0` and `bge-v1.5` are two models.
    """
    return path.name.removesuffix(SUFFIX) or path.name


def is_address(text: str) -> bool:
    """Return whether a text names an artifact by its address, rather than a folder."""
    return "://" in text


def split_name(artifact: Path | str) -> tuple[str, str]:
    """Return the name of a model, and the folder or the address of its artifact.

    artifact: a folder or an address, as a string also `NAME=ARTIFACT`. A folder may have a `=` in its name. Raises
    UsageError for a NAME that cannot be one.
    """
    if not isinstance(artifact, Path) and not os.path.lexists(artifact):
        name, _, source = artifact.partition("=")
        if source and "/" not in name:
            check_name(name)
            return name, source
    source = str(artifact)
    return make_name(Path(source.rstrip("/")) if is_address(source) else Path(source).resolve()), source


def check_name(name: str) -> None:
    """Raise UsageError for what cannot be the name of a model."""
    if not NAME.fullmatch(name):
        shown = name if len(name) <= SHOWN else f"{name[:SHOWN]}..."
        raise UsageError(f"{shown!r} cannot be the name of a model. {RULE}: give another, as NAME=ARTIFACT")
