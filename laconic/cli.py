"""The console script `laconic`: exit codes, and expected errors printed as one sentence.

The names of the top-level packages `train`, `compress`, `export` and `serve` are generic: a file `export.py` in the
working folder would silently take a package's place. So `main` compares the origin of each package with the folder that
holds `laconic` itself, before it imports a command.
"""

import errno
import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import typer

from laconic.errors import LaconicError, UsageError
from laconic.registry import PACKAGES, missing_package

INTERRUPTED = 130
"""The exit code that shells report for a process stopped by Ctrl-C."""

DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
DISK_FULL_HINT = ". No partial output was left. Free some disk space and run the same command again: it resumes"


def raise_interrupt(number: int, frame: object) -> NoReturn:
    """Signal handler: turn SIGTERM into KeyboardInterrupt, so that the stack unwinds and partial output is removed."""
    raise KeyboardInterrupt


def main() -> NoReturn:
    """Run the console script."""
    signal.signal(signal.SIGTERM, raise_interrupt)
    try:
        check_packages()
        from laconic.commands.command_line import app

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
