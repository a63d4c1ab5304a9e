"""The command `laconic`: its commands, and a known error as one sentence."""

import errno
import os
import signal
import sys
from typing import Annotated, NoReturn

import typer

from laconic import __version__
from laconic.commands.artifacts import bench, compare, inspect, serve, verify
from laconic.commands.compression import compress, export
from laconic.commands.installation import doctor, recipes, schema
from laconic.commands.training import finetune, plan
from laconic.errors import LaconicError
from laconic.packages import check_packages

INTERRUPTED = 130
"""The exit code that shells give to what was stopped by Ctrl-C."""

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
ROOM_HINT = ". Nothing half-written was left. Make room, and the same command goes on from there"

COMMANDS = (
    (compress, "laconic compress all-MiniLM-L6-v2 --data texts.jsonl -o minilm.laconic"),
    (export, "laconic export all-MiniLM-L6-v2 -o minilm.laconic"),
    (inspect, "laconic inspect minilm.laconic"),
    (verify, "laconic verify minilm.laconic"),
    (bench, "laconic bench minilm.laconic --original all-MiniLM-L6-v2"),
    (serve, "laconic serve minilm.laconic --port 8000"),
    (finetune, "laconic finetune all-MiniLM-L6-v2 --task text-classification --data d.jsonl -o tuned"),
    (plan, "laconic plan all-MiniLM-L6-v2 --batch 32 --seq 256 --memory 2GiB"),
    (doctor, "laconic doctor"),
    (recipes, "laconic compress all-MiniLM-L6-v2 --recipe text-embedding --data texts.jsonl -o slim"),
    (compare, "laconic compare one.laconic two.laconic --data texts.jsonl"),
    (schema, "laconic schema > recipe.schema.json"),
)
"""In the order of the help, each with an example."""

app = typer.Typer(
    name="laconic",
    help="The same answers, with fewer bits: compress a trained checkpoint, prove it, serve it.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """The same answers, with fewer bits: compress a trained checkpoint, prove it, serve it."""
    if version:
        typer.echo(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


for command, example in COMMANDS:
    app.command(epilog=f"Example: `{example}`")(command)


def raise_interrupt(number: int, frame: object) -> NoReturn:
    """Let a polite request to stop unwind the stack, so that what is half written is removed."""
    raise KeyboardInterrupt


def main() -> NoReturn:
    """The console script."""
    signal.signal(signal.SIGTERM, raise_interrupt)
    try:
        check_packages()
        code = app(standalone_mode=False) or 0
    except LaconicError as error:
        fail(str(error), error.exit_code)
    except typer.TyperException as error:
        fail(error.format_message(), 2)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered goes nowhere
        sys.exit(1)
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        fail(f"{error.strerror or error}{where}{ROOM_HINT if error.errno in FULL else ''}", 1)
    if code == INTERRUPTED:
        fail("interrupted. Nothing half-written was left; what was finished is not done again", INTERRUPTED)
    sys.exit(code)


def fail(message: str, code: int) -> NoReturn:
    """One sentence on the error stream, and the exit code."""
    typer.echo(f"laconic: {message}", err=True)
    sys.exit(code)
