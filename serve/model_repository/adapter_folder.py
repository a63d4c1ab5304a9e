"""A folder of LoRA adapters that is watched: BASE/NAME, where BASE is the name of a served language model.

Adapters come and go as models in a watched folder do. Where the base is replaced, they are loaded for the new one.
"""

import logging
from pathlib import Path

from laconic.errors import UsageError
from laconic.runtimes.adapter_config import is_adapter
from serve.model_repository.adapter_model import AdapterModel
from serve.model_repository.model import Model
from serve.model_repository.repository import Repository
from serve.model_repository.versions import VERSION, FolderListing, Location, Stamp, escape, explain_ambiguity, stamp
from serve.model_repository.watched_folder import WatchedFolder
from serve.settings.server_settings import Settings

log = logging.getLogger("laconic.serve")


class AdapterStore:
    """Adapters in a folder, by the names of their bases."""

    def __init__(self, path: Path, repository: Repository) -> None:
        self.path = path
        self.repository = repository
        self._orphans: set[str] = set()

    def check(self) -> None:
        if not self.path.is_dir():
            raise UsageError(f"there is no folder {self.path}. Make it, or give another one to --adapters")
        if alone := list_adapters(self.path):
            raise UsageError(
                f"{alone[0]} does not say which model it is an adapter of. Move it to "
                f"{self.path / 'MODEL' / alone[0].name}, where MODEL is the name of a served language model"
            )

    def list(self) -> FolderListing:
        """List the adapters whose base is served; the others wait for it, which the log says once."""
        listing = FolderListing({}, {}, {})
        places: dict[str, list[Path]] = {}
        orphans = set()
        for base in sorted(self.path.iterdir()):
            adapters = list_adapters(base)
            if adapters and self.find_base(base.name) is None:
                orphans.add(base.name)
                continue
            for adapter in adapters:
                places.setdefault(escape(adapter.name), []).append(adapter)
        for name, several in places.items():
            if len(several) > 1:
                listing.ambiguous[name] = explain_ambiguity(name, several)
            else:
                listing.versions[name] = {VERSION: several[0]}
        for name in sorted(orphans - self._orphans):
            log.warning("the adapters in %s wait until a language model %r is served", self.path / name, name)
        self._orphans = orphans
        return listing

    def stamp(self, location: Location) -> Stamp:
        """Return what tells whether an adapter and its base are the same."""
        path = Path(location)
        base, files = self.find_base(path.parent.name), stamp(path)
        return (*files, (base.version, base.digest, id(base))) if files and base is not None else ()

    def fetch(self, location: Location) -> Path:
        return Path(location)

    def find_base(self, name: str) -> Model | None:
        """Find a model that adapters can be loaded beside."""
        model = self.repository.get(name) if self.repository.versions(name) else None
        has_adapters = model is not None and model.writer is not None and model.writer.worker.job.has_adapters
        return None if isinstance(model, AdapterModel) or not has_adapters else model


def list_adapters(folder: Path) -> list[Path]:
    """List the adapters in a folder, but for hidden ones: such are being written. One that cannot be read is none."""
    try:
        folders = [each for each in sorted(folder.iterdir()) if not each.name.startswith(".")]
        return [each for each in folders if is_adapter(each)]
    except OSError:
        return []


class AdapterFolder(WatchedFolder):
    """Keeps the adapters of a repository the same as a folder."""

    def __init__(self, path: Path, repository: Repository, settings: Settings) -> None:
        self.adapters = AdapterStore(path, repository)
        super().__init__(str(path), repository, settings, self.adapters)

    def _open(self, location: Location, name: str, version: str) -> Model:
        folder = Path(location)
        base = self.adapters.find_base(folder.parent.name)
        writer = None if base is None else base.text_writer
        if base is None or writer is None:
            raise UsageError(f"no language model {folder.parent.name!r} is served, which {folder} is an adapter of")
        return AdapterModel(base, writer, folder, name=name, version=version)


def open_folders(repository: Repository, settings: Settings) -> list[WatchedFolder]:
    """Make the folder of models and that of adapters, where the settings name them, in the order in which they are to
    be started. Raises UsageError for adapters where artifacts must be signed."""
    folders: list[WatchedFolder] = []
    if settings.models is not None:
        folders.append(WatchedFolder(settings.models, repository, settings))
    if settings.adapters is not None:
        if settings.require_signature is not None:
            raise UsageError(
                "adapters have no signature, and --require-signature is for all that is served. Serve them merged, as "
                "signed artifacts of their own: laconic compress ADAPTER"
            )
        folders.append(AdapterFolder(settings.adapters, repository, settings))
    return folders
