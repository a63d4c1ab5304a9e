"""Arguments and options that several commands share, and the output of --json."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

Source = Annotated[
    str, typer.Argument(help="A checkpoint's folder, a weights file, or an ONNX file.", metavar="SOURCE")
]
Output = Annotated[Path, typer.Option("--output", "-o", help="Folder of the artifact to write.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ArtifactPath = Annotated[Path, typer.Argument(help="Folder of an artifact.", metavar="ARTIFACT")]
Trust = Annotated[bool, typer.Option("--trust", help="Allow code that the source or the recipe brings.")]
Task = Annotated[str | None, typer.Option(help="Task of the model; default: inferred from the source.")]
Builder = Annotated[str | None, typer.Option(help='"package.module:factory" that builds your own module.')]
Data = Annotated[
    Path | None, typer.Option(help="Samples: a .jsonl, .csv, .parquet, .npz or .txt file, or a folder of images.")
]
Threads = Annotated[int, typer.Option(min=1, help="Threads per engine.")]
RuntimeName = Annotated[str | None, typer.Option("--runtime", help="Engine; default: the one the artifact is for.")]


def print_json(value: Any) -> None:
    """Print a value as JSON to the standard output stream."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))
