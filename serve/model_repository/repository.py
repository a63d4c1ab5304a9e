"""The models of a server, by name and version."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from laconic.errors import UnknownModel, did_you_mean

if TYPE_CHECKING:
    from serve.model_repository.model import Model


@dataclass(frozen=True)
class UnavailableVersion:
    """Why a version of a model is not served, or not as it is on disk: it is being loaded, or was refused."""

    state: str
    reason: str


class Repository:
    """Models by name and version, and whether the server accepts requests.

    required: names of the models without which the server is not ready. absent: by name and version. Models are
    published and withdrawn by other threads than the event loop's, which sees the one mapping or the other.
    """

    def __init__(self, models: Iterable["Model"] = (), required: Sequence[str] = ()) -> None:
        self.required = required
        self._models: dict[str, dict[str, Model]] = {}
        self._latest: dict[str, Model] = {}
        self.absent: dict[tuple[str, str], UnavailableVersion] = {}
        self.ready = True
        for model in models:
            self.publish(model)

    def __iter__(self) -> "Iterator[Model]":
        return (model for versions in self._models.values() for model in versions.values())

    def get(self, name: str, version: str | None = None) -> "Model":
        """Return the model of that name, by default its newest version. Raises UnknownModel."""
        if not version:
            model = self._latest.get(name)
        else:
            model = self._models.get(name, {}).get(version) or self._find_digest(name, version)
        if model is None:
            raise self._explain(name, version)
        return model

    def versions(self, name: str) -> list[str]:
        """Return the versions of a model, the newest last."""
        return list(self._models.get(name, ()))

    def publish(self, model: "Model") -> "Model | None":
        """Serve a model from now on. Returns the one of the same name and version that it replaces."""
        versions = dict(self._models.get(model.name, {}))
        replaced = versions.get(model.version)
        versions[model.version] = model
        self._put(model.name, versions)
        return replaced

    def withdraw(self, name: str, version: str) -> "Model | None":
        """Serve a version no longer. Returns it."""
        versions = dict(self._models.get(name, {}))
        model = versions.pop(version, None)
        self._put(name, versions)
        return model

    def close(self) -> None:
        """Close every model after its running batches."""
        self.ready = False
        for model in self:
            model.close()

    def _put(self, name: str, versions: "dict[str, Model]") -> None:
        """Put new mappings in place of the old ones, so that no reader meets one that changes."""
        ordered = dict(sorted(versions.items(), key=lambda item: int(item[0])))
        models = {**self._models, name: ordered}
        latest = {**self._latest, name: list(ordered.values())[-1]} if ordered else dict(self._latest)
        if not ordered:
            del models[name]
            latest.pop(name, None)
        self._models, self._latest = models, latest

    def _find_digest(self, name: str, version: str) -> "Model | None":
        return next((each for each in self._models.get(name, {}).values() if each.digest == version), None)

    def _explain(self, name: str, version: str | None) -> UnknownModel:
        known = self.versions(name)
        if not known:
            return UnknownModel(f"no model {name!r} is served here. {did_you_mean(name, self._models)}")
        return UnknownModel(f"model {name!r} has no version {version!r}, only {', '.join(map(repr, known))}")
