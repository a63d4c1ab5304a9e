"""JSON output of the commands."""

import json
from typing import Any

import typer


def print_json(value: Any) -> None:
    """Print a value as JSON to the standard output stream."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))
