"""Writing the folder of an artifact from its parts."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.numpy import save

from laconic.arrays import Arrays
from laconic.artifacts.golden import flatten_golden
from laconic.artifacts.manifest import CALIBRATION, FORMAT, GOLDEN, MANIFEST, MEASURED, REPORT, Manifest
from laconic.artifacts.placement import Placement
from laconic.hashing import digest_file, seal
from laconic.tasks.task import Task
from laconic.timing.measurements import Measurements

GRAPH_KEY = "graph"
"""The key of the float graph's digest among the metadata of the calibration."""


@dataclass(frozen=True)
class PlacedModel:
    """A placement, its graph, and its golden pairs of inputs and outputs."""

    placement: Placement
    model: Path
    golden: list[tuple[Arrays, Arrays]]


@dataclass(frozen=True)
class ArtifactParts:
    """Everything that an artifact is made of.

    manifest: its fields, without the digests of the files. golden: inputs and outputs of a few batches. report: renders
    the HTML report from the finished manifest and the measurements. calibration: arrays by name. graph_key: digest of
    the float graph. extras: files to be copied. alternatives: for other engines.
    """

    manifest: dict[str, Any]
    model: Path
    task: Task
    golden: list[tuple[Arrays, Arrays]]
    measured: Measurements
    report: Callable[[Manifest, Measurements], str]
    calibration: Arrays
    graph_key: str
    extras: Sequence[Path] = ()
    alternatives: Sequence[PlacedModel] = ()


def write_artifact_folder(parts: ArtifactParts, folder: Path) -> None:
    """Write the files of an artifact to `folder`; the manifest last, with the digest of each."""
    folder.mkdir(parents=True)
    for model in (parts.model, *(each.model for each in parts.alternatives)):
        for file in sorted(model.parent.glob(f"{model.stem}.*")):
            shutil.copyfile(file, folder / file.name)
    (folder / GOLDEN).write_bytes(save(flatten_golden(parts.golden)))
    for each in parts.alternatives:
        (folder / each.placement.golden).write_bytes(save(flatten_golden(each.golden)))
    (folder / CALIBRATION).write_bytes(save(parts.calibration, {GRAPH_KEY: parts.graph_key}))
    for file in parts.extras:
        shutil.copyfile(file, folder / file.name)
    for name, content in parts.task.assets().items():
        (folder / name).write_bytes(content)
    files = {path.name: digest_file(path).model_dump() for path in sorted(folder.iterdir())}
    alternatives = [each.placement.model_dump(mode="json") for each in parts.alternatives]
    version = {"format": FORMAT, "alternatives": alternatives, "files": files}
    manifest = Manifest.model_validate(parts.manifest | version)
    (folder / REPORT).write_text(parts.report(manifest, parts.measured), encoding="utf-8")
    measured = parts.measured.model_copy(update={"report": digest_file(folder / REPORT).sha256})
    (folder / MEASURED).write_bytes(seal(measured.model_dump(mode="json")))
    (folder / MANIFEST).write_bytes(seal(manifest.model_dump(mode="json")))
