"""The manifest of an artifact: its description, sealed with its own digest, and the digests of its files."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator, model_validator

from laconic import registry
from laconic.artifacts.artifact_files import read_sealed
from laconic.artifacts.draft import Draft
from laconic.artifacts.placement import Placement
from laconic.artifacts.record import Record
from laconic.artifacts.verdict import Comparison, Verdict
from laconic.config import explain
from laconic.errors import ArtifactError, CorruptArtifact, UnknownFormat, did_you_mean
from laconic.files import find_replaced
from laconic.hashing import FileDigest
from laconic.runtimes.runtime import Compute
from laconic.tensor import TensorSpec
from laconic.timing.measurements import Measurements

FORMAT = 3
"""The version of the format that is written."""
READ = (1, 2, FORMAT)
"""Those that are read: 1 has one placement, 2 several, and neither says what a verdict leaves in doubt."""
WORST = "fidelity_worst"
MANIFEST = "manifest.json"
MODEL = "model.onnx"
GOLDEN = "golden.safetensors"
MEASURED = "measured.json"
REPORT = "report.html"
CALIBRATION = "calibration.safetensors"
GRAPH, GRAPH_DATA, GRAPH_JSON = "graph.onnx", "graph.data", "graph.json"
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
"""The names of files of an artifact: none is hidden, or reaches into another folder."""
NOT_SERVED = frozenset({CALIBRATION, GRAPH, GRAPH_DATA, GRAPH_JSON})
"""Files that `laconic build` reads, and a server does not."""


class Manifest(BaseModel):
    """The description of an artifact. The same inputs give the same manifest, byte by byte.

    target: the hardware target of the compression. placement: the engine that Q/DQ nodes are placed for. compute: the
    arithmetic of the layers that are not quantized. batching: whether outputs are independent of the other samples in a
    batch; if not, the model is served one sample at a time. precision: the precision of weights and activations, by
    layer. data: the fingerprint of each data file, by role. licence: the licence that the source states. alternatives:
    the same model placed for other engines. int8_kv_cache: whether keys and values are kept in 8 bits;
    int4_value_cache: and of these the values in 4. draft: a smaller model that drafts tokens; None without one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1, 2, 3] = 3
    task: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
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
    int8_kv_cache: bool = False
    int4_value_cache: bool = False
    draft: Draft | None = None

    @field_validator("task", "target", "placement")
    @classmethod
    def _registered(cls, name: str, field: ValidationInfo) -> str:
        """Check that names which select code are those of the registry, never addresses."""
        kind = {"placement": "runtime"}.get(str(field.field_name), str(field.field_name))
        known = registry.TARGETS if kind == "target" else registry.TABLES[kind]
        if name not in known:
            raise ValueError(f"unknown {kind} {name!r}. {did_you_mean(name, known)}")
        return name

    @field_validator("inputs", "outputs")
    @classmethod
    def _has_some(cls, specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        if not specs:
            raise ValueError("expected one tensor or more")
        return specs

    @field_validator("inputs")
    @classmethod
    def _has_axes(cls, inputs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        for spec in inputs:
            if not spec.shape:
                raise ValueError(f"input {spec.name!r} is a single number, expected one axis or more")
        return inputs

    @field_validator("files")
    @classmethod
    def _plain_names(cls, files: dict[str, FileDigest]) -> dict[str, FileDigest]:
        for name in files:
            if not FILE_NAME.fullmatch(name):
                raise ValueError(f"{name[:80]!r} is not the name of a file in the artifact's own folder")
        return files

    @model_validator(mode="after")
    def _complete(self) -> "Manifest":
        for placement in self.placements:
            for comparison in placement.verdict.parity if placement.verdict else ():
                if comparison.check == "engine" and WORST not in comparison.figures:
                    raise ValueError(f"the comparison of engine and {comparison.against} has no figure {WORST!r}")
        return self

    @property
    def served_size(self) -> int:
        """Bytes of the model: the files that it is served from, without the golden outputs that it is checked by."""
        checks = NOT_SERVED | {placement.golden for placement in self.placements}
        return sum(file.size for name, file in self.files.items() if name not in checks)

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
            int8_kv_cache=self.int8_kv_cache,
            int4_value_cache=self.int4_value_cache,
        )
        return (first, *self.alternatives)

    def comparisons(self) -> Iterator[tuple[str, Comparison]]:
        """Return the comparisons of all verdicts, each with its kind: parity, drift or information; those of an
        alternative name its engine."""
        for number, placement in enumerate(self.placements):
            for kind in ("parity", "drift", "information"):
                for each in getattr(placement.verdict, kind, ()):
                    subject = f"{each.subject} for {placement.runtime}" if number else each.subject
                    yield kind, each.model_copy(update={"subject": subject})


def check_manifest_exists(path: Path) -> None:
    """Raise ArtifactError if a folder has no manifest, with what it is instead."""
    if os.path.lexists(path / MANIFEST):
        return
    if replaced := find_replaced(path):
        raise ArtifactError(
            f"there is no {path}: a run that was killed left the earlier artifact in {replaced[0]}. Move it back, or "
            f"run the same command again"
        )
    what = "a checkpoint" if (path / "model.json").is_file() else "not an artifact"
    raise ArtifactError(f"{path} is {what}: it holds no {MANIFEST}. `laconic compress` makes one")


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of the artifact in a folder. Raises UnknownFormat or CorruptArtifact."""
    content = read_sealed(path / MANIFEST)
    if content.get("format") not in READ:
        raise UnknownFormat(
            f"{path} is an artifact of format {content.get('format')!r}; this version of Laconic reads formats "
            f"{READ[0]} to {READ[-1]}. Upgrade Laconic, or compress the model again"
        )
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError as error:
        raise CorruptArtifact(explain(error, f"{path} has a manifest that does not match its format")) from None
    names = [name for placement in manifest.placements for name in (placement.model, placement.golden)]
    for name in [*names, manifest.draft.model] if manifest.draft else names:
        if name not in manifest.files:
            raise CorruptArtifact(f"{path} does not list {name[:80]!r} among its files. Compress the model again")
    return manifest


def read_measurements(path: Path) -> Measurements:
    """Read the measurements in the artifact in a folder. Raises CorruptArtifact."""
    try:
        return Measurements.model_validate(read_sealed(path / MEASURED))
    except ValidationError as error:
        raise CorruptArtifact(explain(error, f"{path / MEASURED} does not match its format")) from None
