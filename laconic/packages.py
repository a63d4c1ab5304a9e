"""The guard of the top-level names: `compress`, `export` and `serve` must be the ones that came with `laconic`.

The names are generic, and a file `export.py` in the working folder would quietly take their place. So each room's
origin is compared with the folder that holds `laconic` itself.
"""

from importlib.util import find_spec
from pathlib import Path

from laconic.errors import UsageError
from laconic.registry import PACKAGES


def check_packages() -> None:
    """Raise UsageError, naming the file, if another module stands where one of Laconic's rooms should be."""
    home = Path(__file__).resolve().parent.parent
    for room in PACKAGES:
        spec = find_spec(room)
        expected = home / room / "__init__.py"
        if spec is None or spec.origin is None:
            raise UsageError(f"package {room!r} is missing beside {home / 'laconic'}: install laconic again")
        if Path(spec.origin).resolve() != expected:
            raise UsageError(
                f"{spec.origin} hides Laconic's package {room!r} ({expected}). "
                f"Rename that file, or run the `laconic` command from another folder"
            )
