"""Where the versions of models lie: an artifact by itself, or folders named 1, 2, ... with one artifact each."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from laconic.artifacts.manifest import MANIFEST
from laconic.artifacts.model_name import make_name

VERSION = "1"
"""The version of an artifact that lies by itself."""
Location = Path | str
"""An artifact's folder, or its address."""
Stamp = tuple[tuple[str | int, ...], ...]
"""What is known of an artifact's files without reading them, as sizes and times: it tells whether they are the same."""


class FolderListing(NamedTuple):
    """What lies in a folder of models, by the names of the models.

    versions: the artifacts by version, the newest first. unreadable: why it is not known what an entry holds.
    ambiguous: why several entries, which would have one name, are not served.
    """

    versions: dict[str, dict[str, Location]]
    unreadable: dict[str, str]
    ambiguous: dict[str, str]


def find_versions(path: Path) -> dict[str, Path]:
    """Find the artifacts of one model by version, the newest first; empty where there are none.

    A version that cannot be read is among them: to open it says why. Raises OSError for a folder that cannot be read.
    """
    if (path / MANIFEST).is_file():
        return {VERSION: path}
    folders = [folder for folder in path.iterdir() if folder.name.isdecimal()] if path.is_dir() else []
    folders.sort(key=lambda folder: int(folder.name), reverse=True)
    return {folder.name: folder for folder in folders if may_hold_artifact(folder)}


def may_hold_artifact(path: Path) -> bool:
    """Return whether a folder holds an artifact, or cannot be read."""
    try:
        return (path / MANIFEST).is_file()
    except OSError:
        return True


def list_models(folder: Path) -> FolderListing:
    """List the models in a folder. The name of each is that of its own folder without `.laconic`.

    Hidden folders are left out: an artifact that is being written or replaced has one. Raises OSError where the folder
    itself cannot be read.
    """
    listing = FolderListing({}, {}, {})
    paths: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.name.startswith("."):
            continue
        name = escape(make_name(path))
        try:
            versions = find_versions(path)
        except OSError as error:
            listing.unreadable[name] = f"{escape(path)} cannot be read: {error.strerror or error}"
        else:
            if not versions:
                continue
            if name == make_name(path):
                listing.versions[name] = {**versions}
            else:
                listing.unreadable[name] = f"the name of {escape(path)} is not UTF-8. Rename the folder"
        paths.setdefault(name, []).append(path)
    for name, several in paths.items():
        if len(several) > 1:
            listing.versions.pop(name, None)
            listing.unreadable.pop(name, None)
            listing.ambiguous[name] = explain_ambiguity(name, several)
    return listing


def explain_ambiguity(name: str, paths: Iterable[Path | str]) -> str:
    """Say which folders would be served under one name."""
    return (
        f"{' and '.join(map(escape, paths))} would both be served as {name!r}. Rename one of the folders, or give it a "
        f"name on the command line: NAME=ARTIFACT"
    )


def escape(path: Path | str) -> str:
    """Return a path as text that can be sent and written: a file's name need not be UTF-8."""
    return str(path).encode(errors="backslashreplace").decode()


def stamp(path: Path) -> Stamp:
    """Read the stamp of an artifact; an empty one while files come and go."""
    try:
        files = [(file.name, file.stat()) for file in sorted(path.iterdir())]
    except OSError:
        return ()
    return tuple((name, status.st_ino, status.st_size, status.st_mtime_ns) for name, status in files)
