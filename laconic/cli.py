"""The console script `laconic`: its commands, exit codes, and expected errors printed as one sentence.

The names of the top-level packages `train`, `compress`, `export` and `serve` are generic: a file `export.py` in the
working folder would silently take a package's place. So `main` compares the origin of each package with the folder that
holds `laconic` itself.
"""

import errno
import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from laconic import __version__
from laconic.commands.artifacts import bench, compare, inspect, lint, tune, verify
from laconic.commands.compression import build, compress, export
from laconic.commands.installation import doctor, recipes, schema
from laconic.commands.serving import serve
from laconic.commands.training import finetune, merge, plan
from laconic.errors import LaconicError, UsageError
from laconic.registry import PACKAGES, missing_package

INTERRUPTED = 130
"""The exit code that shells report for a process stopped by Ctrl-C."""

DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
DISK_FULL_HINT = ". No partial output was left. Free some disk space and run the same command again: it resumes"

COMMANDS = (
    (compress, "laconic compress all-MiniLM-L6-v2 --data texts.jsonl -o minilm.laconic"),
    (export, "laconic export all-MiniLM-L6-v2 -o minilm.laconic"),
    (build, "laconic build minilm.laconic --target tensorrt --original all-MiniLM-L6-v2 -o minilm-gpu.laconic"),
    (inspect, "laconic inspect minilm.laconic"),
    (verify, "laconic verify minilm.laconic"),
    (bench, "laconic bench minilm.laconic --original all-MiniLM-L6-v2"),
    (tune, "laconic tune minilm.laconic --original all-MiniLM-L6-v2"),
    (serve, "laconic serve minilm.laconic --port 8000"),
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


def raise_interrupt(number: int, frame: object) -> NoReturn:
    """Signal handler: turn SIGTERM into KeyboardInterrupt, so that the stack unwinds and partial output is removed."""
    raise KeyboardInterrupt


def main() -> NoReturn:
    """Run the console script."""
    signal.signal(signal.SIGTERM, raise_interrupt)
    try:
        check_packages()
        code = app(standalone_mode=False) or 0
    except LaconicError as error:
        fail(str(error), error.exit_code)
    except typer.TyperException as error:
        fail(error.format_message(), 2)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in PACKAGES:
            raise  # a fault of Laconic's own, not a package to install
        missing = missing_package(error.name)
        fail(str(missing), missing.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discard what is still buffered
        sys.exit(1)
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        fail(f"{error.strerror or error}{where}{DISK_FULL_HINT if error.errno in DISK_FULL else ''}", 1)
    if code == INTERRUPTED:
        fail("interrupted. No partial output was left; finished steps are in the cache", INTERRUPTED)
    sys.exit(code)


def check_packages() -> None:
    """Raise UsageError, naming the file, where another module shadows one of Laconic's packages."""
    home = Path(__file__).resolve().parent.parent
    for package in PACKAGES:
        spec = find_spec(package)
        expected = home / package / "__init__.py"
        if spec is None or spec.origin is None:
            raise UsageError(f"package {package!r} is missing beside {home / 'laconic'}: install laconic again")
        if Path(spec.origin).resolve() != expected:
            raise UsageError(
                f"{spec.origin} shadows Laconic's package {package!r} ({expected}). "
                f"Rename that file, or run the `laconic` command from another folder"
            )


def fail(message: str, code: int) -> NoReturn:
    """Print one sentence to the standard error stream, and exit with the code."""
    typer.echo(f"laconic: {message}", err=True)
    sys.exit(code)
