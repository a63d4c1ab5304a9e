"""The models of a server, by name."""

from collections.abc import Iterable, Iterator

from laconic.errors import UnknownModel
from laconic.registry import did_you_mean
from serve.model import VERSION, Model


class Repository:
    """Models by name, and whether the server accepts requests."""

    def __init__(self, models: Iterable[Model]) -> None:
        self._models = {model.name: model for model in models}
        self.ready = True

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
