"""Where the versions of models lie: an artifact by itself, or folders named 1, 2, ... with one artifact each."""

from pathlib import Path

from laconic.artifacts.manifest import MANIFEST

VERSION = "1"
"""The version of an artifact that lies by itself."""
Stamp = tuple[tuple[str, int, int, int], ...]
"""Names, inodes, sizes and times of an artifact's files, which tell whether it is still the same."""


def find_versions(path: Path) -> dict[str, Path]:
    """The artifacts of one model by version, the newest first; empty where there are none."""
    if (path / MANIFEST).is_file():
        return {VERSION: path}
    numbered = [each for each in path.iterdir() if each.name.isdecimal()] if path.is_dir() else []
    numbered.sort(key=lambda each: int(each.name), reverse=True)
    return {each.name: each for each in numbered if (each / MANIFEST).is_file()}


def find_models(folder: Path) -> dict[str, dict[str, Path]]:
    """The versions of every model in a folder, by name: that of its own folder without the suffix.

    Hidden folders are left out: an artifact that is being written or replaced has one.
    """
    found: dict[str, dict[str, Path]] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if not path.name.startswith(".") and (versions := find_versions(path)):
            found.setdefault(path.stem, versions)
    return found


def stamp(path: Path) -> Stamp:
    """The stamp of an artifact; an empty one while files come and go."""
    try:
        files = [(file.name, file.stat()) for file in sorted(path.iterdir())]
    except OSError:
        return ()
    return tuple((name, found.st_ino, found.st_size, found.st_mtime_ns) for name, found in files)
