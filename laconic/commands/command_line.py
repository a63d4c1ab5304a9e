"""The commands of `laconic` as a typer application."""

from typing import Annotated

import typer

from laconic import __version__
from laconic.commands.artifacts import bench, compare, inspect, lint, package, sign, tune
from laconic.commands.capacity import size
from laconic.commands.compression import build, compress, export
from laconic.commands.installation import doctor, recipes, schema
from laconic.commands.planning import plan
from laconic.commands.serving import serve
from laconic.commands.training import finetune, merge
from laconic.commands.verification import verify

COMMANDS = (
    (compress, "laconic compress all-MiniLM-L6-v2 --data texts.jsonl -o minilm.laconic"),
    (export, "laconic export all-MiniLM-L6-v2 -o minilm.laconic"),
    (build, "laconic build minilm.laconic --target tensorrt --original all-MiniLM-L6-v2 -o minilm-gpu.laconic"),
    (inspect, "laconic inspect minilm.laconic"),
    (verify, "laconic verify minilm.laconic"),
    (sign, "laconic sign minilm.laconic --key private.pem"),
    (package, "laconic package minilm.laconic -o image"),
    (bench, "laconic bench minilm.laconic --original all-MiniLM-L6-v2"),
    (tune, "laconic tune minilm.laconic --original all-MiniLM-L6-v2"),
    (serve, "laconic serve minilm.laconic --port 8000"),
    (size, "laconic size minilm.laconic --rate 2000/s --p99 50ms"),
    (finetune, "laconic finetune all-MiniLM-L6-v2 --task text-classification --data d.jsonl -o tuned"),
    (merge, "laconic merge adapter -o merged"),
    (plan, "laconic plan all-MiniLM-L6-v2 --batch 32 --seq 256 --memory 2GiB"),
    (doctor, "laconic doctor"),
    (recipes, "laconic compress all-MiniLM-L6-v2 --recipe text-embedding --data texts.jsonl -o slim"),
    (compare, "laconic compare one.laconic two.laconic --data texts.jsonl"),
    (lint, "laconic lint minilm.laconic"),
    (schema, "laconic schema > recipe.schema.json"),
)
"""The commands in the order of the help, each with an example."""

app = typer.Typer(
    name="laconic",
    help="The same answers, with fewer bits: compress a trained checkpoint, validate the result, serve it.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """The same answers, with fewer bits: compress a trained checkpoint, validate the result, serve it."""
    if version:
        typer.echo(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


for command, example in COMMANDS:
    app.command(epilog=f"Example: `{example}`")(command)
