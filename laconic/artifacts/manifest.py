"""The manifest of an artifact: its description, sealed with its own digest, and the digests of its files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from laconic import registry
from laconic.artifacts.placement import Placement
from laconic.artifacts.record import Record
from laconic.artifacts.verdict import Comparison, Verdict
from laconic.config import explain
from laconic.errors import CorruptArtifact, UnknownFormat
from laconic.hashing import FileDigest, unseal
from laconic.runtimes.runtime import Compute
from laconic.tensor import TensorSpec
from laconic.timing.measurements import Measurements

FORMAT, PORTABLE = 1, 2
"""The versions of the format: with one placement, and with several."""
MANIFEST = "manifest.json"
MODEL = "model.onnx"
GOLDEN = "golden.safetensors"
MEASURED = "measured.json"
REPORT = "report.html"
CALIBRATION = "calibration.safetensors"
GRAPH, GRAPH_DATA, GRAPH_JSON = "graph.onnx", "graph.data", "graph.json"
NOT_SERVED = frozenset({CALIBRATION, GRAPH, GRAPH_DATA, GRAPH_JSON})
"""Files that `laconic build` reads, and a server does not."""


class Manifest(BaseModel):
    """The description of an artifact. The same inputs give the same manifest, byte by byte.

    target: the hardware target of the compression. placement: the engine that Q/DQ nodes are placed for. compute: the
    arithmetic of the layers that are not quantized. batching: whether outputs are independent of the other samples in a
    batch; if not, the model is served one sample at a time. precision: the precision of weights and activations, by
    layer. data: the fingerprint of each data file, by role. licence: the licence that the source states. alternatives:
    the same model placed for other engines; only a manifest of format 2 has any.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1, 2] = 1
    task: str
    inputs: tuple[TensorSpec, ...] = Field(min_length=1)
    outputs: tuple[TensorSpec, ...] = Field(min_length=1)
    target: str
    placement: str
    compute: Compute
    precision: dict[str, str]
    source: dict[str, Any]
    history: tuple[Record, ...]
    recipe: dict[str, Any]
    verdict: Verdict | None
    batching: bool = True
    versions: dict[str, str]
    data: dict[str, str]
    licence: str | None
    files: dict[str, FileDigest]
    alternatives: tuple[Placement, ...] = ()

    @field_validator("task", "target", "placement")
    @classmethod
    def _registered(cls, name: str, field: ValidationInfo) -> str:
        """Names that select code are those of the registry, never addresses."""
        kind = {"placement": "runtime"}.get(str(field.field_name), str(field.field_name))
        known = registry.TARGETS if kind == "target" else registry.TABLES[kind]
        if name not in known:
            raise ValueError(f"unknown {kind} {name!r}. {registry.did_you_mean(name, known)}")
        return name

    @field_validator("files")
    @classmethod
    def _plain_names(cls, files: dict[str, FileDigest]) -> dict[str, FileDigest]:
        for name in files:
            if Path(name).name != name:
                raise ValueError(f"{name!r} is not a file in the artifact's own folder")
        return files

    @model_validator(mode="after")
    def _complete(self) -> "Manifest":
        if bool(self.alternatives) != (self.format == PORTABLE):
            raise ValueError(f"format {PORTABLE} has alternatives, and format {FORMAT} has none")
        missing = [name for each in self.alternatives for name in (each.model, each.golden) if name not in self.files]
        if missing:
            raise ValueError(f"{missing[0]!r} is not among the files")
        return self

    @model_serializer(mode="wrap")
    def _as_format(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """In format 1 the key of format 2 is left out, so that earlier versions read it."""
        content: dict[str, Any] = dump(self)
        if not self.alternatives:
            content.pop("alternatives", None)
        return content

    @property
    def served_size(self) -> int:
        """Bytes of the files that are needed to serve the artifact."""
        return sum(file.size for name, file in self.files.items() if name not in NOT_SERVED)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The preferred placement, and the alternatives."""
        first = Placement(
            runtime=self.placement,
            compute=self.compute,
            precision=self.precision,
            model=MODEL,
            golden=GOLDEN,
            verdict=self.verdict,
        )
        return (first, *self.alternatives)

    def comparisons(self) -> Iterator[tuple[str, Comparison]]:
        """The comparisons of all verdicts, each with its kind, parity or drift; those of an alternative name its
        engine."""
        for number, placement in enumerate(self.placements):
            for kind in ("parity", "drift"):
                for each in getattr(placement.verdict, kind, ()):
                    subject = f"{each.subject} for {placement.runtime}" if number else each.subject
                    yield kind, each.model_copy(update={"subject": subject})


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of the artifact in a folder. Raises UnknownFormat or CorruptArtifact."""
    content = unseal(path / MANIFEST)
    if content.get("format") not in (FORMAT, PORTABLE):
        raise UnknownFormat(
            f"{path} is an artifact of format {content.get('format')!r}; this version of Laconic reads {FORMAT} and "
            f"{PORTABLE}. Upgrade Laconic, or compress the model again"
        )
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        raise CorruptArtifact(explain(error, f"{path} has a manifest that does not match its format")) from None


def read_measurements(path: Path) -> Measurements:
    """Read the measurements in the artifact in a folder. Raises CorruptArtifact."""
    try:
        return Measurements.model_validate(unseal(path / MEASURED))
    except ValidationError as error:
        raise CorruptArtifact(explain(error, f"{path / MEASURED} does not match its format")) from None
