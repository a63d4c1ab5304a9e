"""Files of a task in an artifact."""

import json
from pathlib import Path
from typing import Any

from laconic.errors import CorruptArtifact
from laconic.files import read_json

PREPROCESS = "preprocess.json"
TOKENIZER = "tokenizer.json"
VOCABULARY = "vocabulary.json"
"""How many ids the model takes, where its tokenizer gives more."""
LABELS = "labels.json"


def read_asset(folder: Path, name: str) -> Any:
    """Read the JSON in a file of the artifact. Raises CorruptArtifact."""
    try:
        return read_json(folder / name)
    except FileNotFoundError:
        raise CorruptArtifact(f"{folder / name} is missing. Compress the model again") from None
    except (OSError, ValueError) as error:
        raise CorruptArtifact(f"{folder / name} does not read: {error}. Compress the model again") from error


def to_json(value: Any) -> bytes:
    """Return JSON with sorted keys and a final newline: the same value gives the same bytes."""
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
