"""The models of a server, by name."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from laconic.artifacts.artifact import Artifact
from laconic.errors import UnknownModel, UsageError
from laconic.registry import did_you_mean
from serve.model import VERSION, Model
from serve.server_settings import Settings


class Repository:
    """Models by name, and whether the server accepts requests."""

    def __init__(self, models: Iterable[Model]) -> None:
        self._models = {model.name: model for model in models}
        self.ready = True

    @classmethod
    def open(cls, paths: Iterable[Path], settings: Settings) -> "Repository":
        """Load and check every artifact. Raises UsageError for none or two of a name, and the artifact's own errors."""
        artifacts: dict[str, Artifact] = {}
        for path in paths:
            artifact = Artifact.load(path)
            if artifact.name in artifacts:
                raise UsageError(
                    f"{path} and {artifacts[artifact.name].path} would both be served as {artifact.name!r}. "
                    f"Rename one of the folders"
                )
            artifacts[artifact.name] = artifact
        if not artifacts:
            raise UsageError("no artifact was given: there is nothing to serve")
        models: list[Model] = []
        try:
            for artifact in artifacts.values():
                models.append(Model.open(artifact, settings))
        except BaseException:
            for model in models:
                model.close()
            raise
        return cls(models)

    def __iter__(self) -> Iterator[Model]:
        return iter(self._models.values())

    def get(self, name: str, version: str = VERSION) -> Model:
        """The model of that name. Raises UnknownModel."""
        model = self._models.get(name)
        if model is None:
            raise UnknownModel(f"no model {name!r} is served here. {did_you_mean(name, self._models)}")
        if version != VERSION:
            raise UnknownModel(f"model {name!r} has no version {version!r}, only {VERSION!r}")
        return model

    def close(self) -> None:
        """Close every model after its running batches."""
        self.ready = False
        for model in self:
            model.close()
