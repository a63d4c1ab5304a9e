"""The guard of the top-level names: `compress`, `export` and `serve` must be the packages that came with `laconic`.

The names are generic, and a file `export.py` in the working folder would quietly take the place of a package. So the
origin of each package is compared with the folder that holds `laconic` itself.
"""

from importlib.util import find_spec
from pathlib import Path

from laconic.errors import UsageError
from laconic.registry import PACKAGES


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
