"""Where the models of a server are looked for: in a folder, or below an address of an object store."""

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from laconic.artifacts.download import RemoteFolder, fetch_artifact
from laconic.artifacts.manifest import MANIFEST
from laconic.artifacts.model_name import is_address, make_name
from laconic.errors import UsageError
from serve.model_repository.artifact_sources import read_signer
from serve.model_repository.versions import (
    VERSION,
    FolderListing,
    Location,
    Stamp,
    explain_ambiguity,
    list_models,
    stamp,
)
from serve.settings.server_settings import Settings

LISTED = ("s3://", "gs://", "hf://")
"""Addresses whose stores list what they hold, with what changes with a file. Web servers do neither."""


class ModelStore(Protocol):
    """Artifacts that come and go."""

    def check(self) -> None:
        """Raise UsageError where there is no such place."""

    def list(self) -> FolderListing:
        """List the models. Raises OSError, or ArtifactError for a store, where the place cannot be read."""

    def stamp(self, location: Location) -> Stamp:
        """Return what tells whether an artifact of the last listing is still the same; empty while it changes."""

    def fetch(self, location: Location) -> Path:
        """Return the folder of an artifact of the last listing. Raises what downloading it raises."""


def make_store(models: str, settings: Settings) -> ModelStore:
    """Make the store for the setting `models`. Raises UsageError for an address of another kind."""
    if not is_address(models):
        return FolderStore(Path(models))
    if not models.startswith(LISTED):
        raise UsageError(f"{models} cannot be watched: expected a folder, or an address of {', '.join(LISTED)}")
    return ObjectStore(models.rstrip("/"), settings)


class FolderStore:
    """A folder of artifacts."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def check(self) -> None:
        if not self.path.is_dir():
            raise UsageError(f"there is no folder {self.path}. Make it, or give another one to --models")

    def list(self) -> FolderListing:
        return list_models(self.path)

    def stamp(self, location: Location) -> Stamp:
        return stamp(Path(location))

    def fetch(self, location: Location) -> Path:
        return Path(location)


class ObjectStore:
    """Artifacts below an address, laid out as in a folder; each is downloaded once into the cache, by its digest."""

    def __init__(self, address: str, settings: Settings) -> None:
        self.address = address
        self.settings = settings
        self._remote = RemoteFolder(address, settings.download_timeout)
        self._stamps: dict[str, Stamp] = {}

    def check(self) -> None:
        files = self._remote.list_files()
        if not files:
            raise UsageError(f"there is nothing at {self.address}. Put an artifact there, or give --models another one")
        if MANIFEST in files:
            raise UsageError(f"{self.address} is an artifact, and not a place of several. Give it without --models")

    def list(self) -> FolderListing:
        files = self._remote.list_files()
        folders = find_artifacts(files)
        self._stamps = {
            f"{self.address}/{folder}": tuple(
                sorted((name, *mark) for name, mark in files.items() if name.startswith(f"{folder}/"))
            )
            for folder in folders
        }
        listing = FolderListing({}, {}, {})
        places: dict[str, set[str]] = {}
        for folder, version in sorted(folders.items(), key=lambda item: int(item[1]), reverse=True):
            top = folder.partition("/")[0]
            name = make_name(Path(top))
            listing.versions.setdefault(name, {})[version] = f"{self.address}/{folder}"
            places.setdefault(name, set()).add(f"{self.address}/{top}")
        for name, several in places.items():
            if len(several) > 1:
                del listing.versions[name]
                listing.ambiguous[name] = explain_ambiguity(name, sorted(several))
        return listing

    def stamp(self, location: Location) -> Stamp:
        return self._stamps.get(str(location), ())

    def fetch(self, location: Location) -> Path:
        timeout, signer = self.settings.download_timeout, read_signer(self.settings)
        return fetch_artifact(str(location), sha256=None, timeout=timeout, signer=signer)


def find_artifacts(names: Iterable[str]) -> dict[str, str]:
    """Find the folders of artifacts among the names of files below an address, with the version of each: `minilm` is
    version 1 of a model, `resnet/2` version 2. Hidden ones are left out."""
    folders = [name.removesuffix(f"/{MANIFEST}") for name in names if name.endswith(f"/{MANIFEST}")]
    alone = {folder for folder in folders if "/" not in folder and not folder.startswith(".")}
    versions = {}
    for folder in folders:
        top, _, version = folder.partition("/")
        if version.isdecimal() and top not in alone and not top.startswith("."):
            versions[folder] = version
    return dict.fromkeys(alone, VERSION) | versions
