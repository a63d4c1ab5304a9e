"""The JSON files of a source, as config.json."""

from pathlib import Path
from typing import Any

from laconic.errors import SourceError
from laconic.files import read_json


def read_source_json(path: Path) -> Any:
    """Read the JSON in a file of the source. Raises SourceError."""
    try:
        return read_json(path)
    except FileNotFoundError:
        raise SourceError(f"{path} is missing. Copy the model's folder again, with all of its files") from None
    except (OSError, ValueError) as error:
        raise SourceError(f"{path} does not read as JSON: {error}. Copy the model's folder again") from error
