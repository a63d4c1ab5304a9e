"""A folder of artifacts, or a prefix of an object store, that is watched: the models that are served follow what lies
in it.

A new version is loaded, checked and run before it takes the place of the old one, which ends when its last request is
answered. One that cannot be loaded changes nothing but the index, where the reason stands.
"""

import logging
import threading
import time

from laconic.errors import INTERRUPTS, ArtifactError, NotReady, UnknownModel, UsageError, describe_error, did_you_mean
from serve.model_repository.loader import open_version
from serve.model_repository.model import Model
from serve.model_repository.model_store import ModelStore, make_store
from serve.model_repository.repository import Repository, UnavailableVersion
from serve.model_repository.versions import VERSION, FolderListing, Location, Stamp, explain_ambiguity
from serve.settings.server_settings import Settings

LINGER = 1.0
"""Seconds that a model that was replaced stays open at least: for who has looked it up, and not begun to use it."""
Key = tuple[str, str]
"""A name and a version."""

log = logging.getLogger("laconic.serve")


class WatchedFolder:
    """Keeps a repository the same as a folder, in a thread of its own.

    A model that the repository holds from the start keeps its name to itself.
    """

    def __init__(self, path: str, repository: Repository, settings: Settings, store: ModelStore | None = None) -> None:
        """store: what the path holds; artifacts where None."""
        self.path = path
        self.store = store or make_store(path, settings)
        self.repository = repository
        self.settings = settings
        self._reserved = {model.name: model.artifact.path for model in repository}
        self._served: dict[Key, Stamp] = {}
        self._refused: dict[Key, Stamp] = {}
        self._seen: dict[Key, Stamp] = {}
        self._blocked: dict[str, str] = {}
        self._unloaded: set[str] = set()
        self._failure = ""
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="model-folder", daemon=True)

    def start(self) -> None:
        """Load what is there, and watch the folder from now on.

        Raises UsageError if there is no such folder, and ArtifactError if there are artifacts in it, and none can be
        served. An entry that cannot be read may be none, such as `lost+found`.
        """
        self.store.check()
        with self._lock:
            listing = self.store.list()
            self._synchronize(listing, settled=set(listing.versions))
        absent = self.repository.absent.items()
        reasons = [unavailable.reason for (name, _), unavailable in absent if name not in listing.unreadable]
        if reasons and not list(self.repository):
            raise ArtifactError(f"nothing in {self.path} can be served: {'; '.join(reasons)}")
        self._watcher.start()

    def close(self) -> None:
        """Watch no longer."""
        self._stopped.set()

    def load(self, name: str) -> None:
        """Load the newest version of a model, if it is not served, and keep it loaded.

        Raises UnknownModel, and ArtifactError with the reason where it cannot be served.
        """
        with self._lock:
            listing = self.store.list()
            version = self._find(name, listing)[0]
            self._unloaded.discard(name)
            newest = (name, version)
            for key in [key for key in self._refused if key[0] == name]:
                del self._refused[key]
            served = self.repository.get(name) if newest in self._served else None
            if served is not None and served.backend.reason:
                self._served[newest] = ()  # whatever keeps its engine from running: open it anew
            self._synchronize(listing, settled={name})
            if newest in self._refused or newest not in self._served:
                unavailable = self.repository.absent.get(newest)
                raise ArtifactError(
                    f"model {name!r} is not loaded: {unavailable.reason if unavailable else 'it has gone'}"
                )

    def unload(self, name: str) -> None:
        """Serve a model no longer, until it is loaded again. Raises UnknownModel."""
        with self._lock:
            versions = self._find(name, self.store.list())
            self._unloaded.add(name)
            for key in [each for each in self._served if each[0] == name]:
                self._withdraw(key)
            for version in versions[: self.settings.keep_versions]:
                self.repository.absent[name, version] = UnavailableVersion("UNAVAILABLE", "unloaded")

    def serves(self, name: str) -> bool:
        """Return whether something of that name is served from the folder."""
        return any(served == name for served, _ in list(self._served))

    def holds(self, name: str) -> bool:
        """Return whether the folder has something of that name. Raises OSError where it cannot be read."""
        return any(name in part for part in self.store.list())

    def _find(self, name: str, listing: FolderListing) -> list[str]:
        """Find the versions of a model in the folder, the newest first. Raises UnknownModel, and ArtifactError where
        the folder of the model cannot be read."""
        if reason := listing.unreadable.get(name) or listing.ambiguous.get(name):
            raise ArtifactError(f"model {name!r} is not loaded: {reason}")
        models = {model: versions for model, versions in listing.versions.items() if model not in self._reserved}
        if name not in models:
            raise UnknownModel(f"the folder of models holds no {name!r}. {did_you_mean(name, models)}")
        return list(models[name])

    def _watch(self) -> None:
        """Look at the folder until it is closed, whatever happens in one look."""
        while not self._stopped.wait(self.settings.poll):
            failure = ""
            try:
                with self._lock:
                    self._synchronize(self.store.list())
            except OSError as error:  # a file system that is away for a while
                failure = f"{self.path} cannot be read: {error.strerror or error}"
            except ArtifactError as error:  # a store that is away for a while; it says so itself
                failure = describe_error(error)
            except BaseException as error:  # noqa: BLE001 - it would end this thread alone, and no change would be seen
                failure = f"the change of {self.path} failed: {describe_error(error)}"
            if failure and failure != self._failure:
                log.error("%s", failure)
            self._failure = failure

    def _synchronize(self, listing: FolderListing, settled: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        """Serve what is in the folder. An artifact is taken when it has not changed between two looks.

        settled: names of models that are taken as they are.
        """
        models = listing.versions
        blocked = listing.unreadable | listing.ambiguous
        stamps = {(name, version): self.store.stamp(path) for name in models for version, path in models[name].items()}
        known = [key for key in (*self._served, *self._refused) if key[0] not in blocked]
        gone = [key for key in known if key not in stamps and key not in self._seen]
        before, self._seen = self._seen, stamps
        self._note_blocked(blocked)
        for name, versions in models.items():
            if name in self._unloaded:
                continue
            kept = 0
            for version, path in versions.items():
                key = (name, version)
                if kept == self.settings.keep_versions:
                    self._withdraw(key)
                elif name in settled or before.get(key) == stamps[key]:
                    kept += self._provide(key, path, stamps[key])
                else:
                    kept += key in self._served
        for key in gone:
            self._withdraw(key)
        for name in self._unloaded - {*models, *blocked}:
            self._unloaded.discard(name)
            for key in [key for key in self.repository.absent if key[0] == name]:
                del self.repository.absent[key]

    def _note_blocked(self, blocked: dict[str, str]) -> None:
        """Note the models of which nothing can be loaded, whose versions stay served as they are. blocked: why."""
        for name in self._blocked.keys() - blocked.keys():
            for key in [key for key in self.repository.absent if key[0] == name]:
                self._refused.pop(key, None)  # to be looked at again
                del self.repository.absent[key]
        for name, reason in blocked.items():
            if self._blocked.get(name) != reason:
                log.error("model %s is not loaded: %s", name, reason)
            for key in [key for key in self._served if key[0] == name] or [(name, VERSION)]:
                self.repository.absent[key] = UnavailableVersion("UNAVAILABLE", reason)
        self._blocked = blocked

    def _provide(self, key: Key, location: Location, files: Stamp) -> bool:
        """Serve a version as it lies in the folder. Returns whether it is served, be it as it was before."""
        if files in (self._served.get(key), self._refused.get(key)):
            return key in self._served
        name, version = key
        before = self.repository.absent.get(key)
        self.repository.absent[key] = UnavailableVersion("LOADING", "")
        try:
            if self.repository.versions(name) and not self.serves(name):
                raise UsageError(explain_ambiguity(name, (self.repository.get(name).location, location)))
            model = self._open(location, name, version)
        except INTERRUPTS:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is, what is served stays
            reason = describe_error(error)
            is_passing = isinstance(error, NotReady)  # an engine that is started again: tried with each look, said once
            if not is_passing:
                self._refused[key] = files
            if not is_passing or before is None or before.reason != reason:
                log.error("model %s, version %s, is not loaded: %s", name, version, reason)
            self.repository.absent[key] = UnavailableVersion("UNAVAILABLE", reason)
            return key in self._served
        self._refused.pop(key, None)
        self._served[key] = files
        retire(self.repository.publish(model))
        self.repository.absent.pop(key, None)
        log.info("model %s, version %s, is served", name, version)
        return True

    def _open(self, location: Location, name: str, version: str) -> Model:
        """Open a version of a model. Raises what is wrong with it."""
        return open_version(self.store.fetch(location), self.settings, name=name, version=version)

    def _withdraw(self, key: Key) -> None:
        self._refused.pop(key, None)
        self.repository.absent.pop(key, None)
        if self._served.pop(key, None) is not None:
            retire(self.repository.withdraw(*key))
            log.info("model %s, version %s, is no longer served", *key)


def retire(model: Model | None) -> None:
    """Close a model that is no longer served, after its last request and those with its adapters."""

    def close(model: Model) -> None:
        time.sleep(LINGER)
        while model.users or model.adapters:
            time.sleep(0.1)
        model.close()

    if model is not None:
        threading.Thread(target=close, args=(model,), name="model-retirement", daemon=True).start()
