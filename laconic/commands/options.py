"""Arguments and options that several commands share, and the output of --json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from laconic.errors import UsageError

Source = Annotated[
    str, typer.Argument(help="A checkpoint's folder, a weights file, or an ONNX file.", metavar="SOURCE")
]
Output = Annotated[Path, typer.Option("--output", "-o", help="Folder of the artifact to write.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ArtifactPath = Annotated[Path, typer.Argument(help="Folder of an artifact.", metavar="ARTIFACT")]
Trust = Annotated[bool, typer.Option("--trust", help="Allow code that the source or the recipe brings.")]
Task = Annotated[str | None, typer.Option(help="Task of the model; default: inferred from the source.")]
Builder = Annotated[str | None, typer.Option(help='"package.module:factory" that builds your own module.')]
WeightsKey = Annotated[
    str | None, typer.Option(help="Key or prefix of the weights in a weights file that holds several, as ema.")
]
Data = Annotated[
    Path | None,
    typer.Option(
        help="Samples: a .jsonl, .csv, .parquet, .tar, .npz or .txt file, a folder of shards or of images, a pattern."
    ),
]
Columns = Annotated[
    list[str] | None,
    typer.Option("--column", help="Another name of a column, as text=sentence or label=category; may be repeated."),
]
Threads = Annotated[int, typer.Option(min=1, help="Threads per engine.")]
RuntimeName = Annotated[str | None, typer.Option("--runtime", help="Engine; default: the one the artifact is for.")]


def parse_columns(texts: list[str]) -> dict[str, str]:
    """Parse columns, as text=sentence: the names in the files, by the task's. Raises UsageError."""
    pairs = [each.partition("=") for each in texts]
    for each, (name, _, other) in zip(texts, pairs, strict=True):
        if not name or not other:
            raise UsageError(f"--column {each}: expected the task's name and the file's, as text=sentence")
    return {name: other for name, _, other in pairs}


def print_json(value: Any) -> None:
    """Print a value as JSON to the standard output stream."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def check_unused(options: Mapping[str, object], reason: str) -> None:
    """Raise UsageError for options that were given and are of no use here. options: by name; None where not given."""
    if unused := [name for name, value in options.items() if value is not None]:
        raise UsageError(f"{', '.join(unused)} is {reason}")
