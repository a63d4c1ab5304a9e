"""What programs read."""

import json
from typing import Any

import typer


def print_json(value: Any) -> None:
    """On the standard output stream."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))
