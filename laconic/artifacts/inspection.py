"""Inspection and verification of an artifact: its description, the kernels that run, and its digests and outputs."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from laconic.artifacts.artifact import Artifact, is_installed
from laconic.artifacts.artifact_files import check_digest, check_unlisted
from laconic.artifacts.artifact_signature import check_signature, read_public_key
from laconic.artifacts.golden import find_golden_floor
from laconic.artifacts.ledger import JSON, StageEntry, make_ledger
from laconic.artifacts.manifest import (
    MANIFEST,
    MEASURED,
    REPORT,
    Manifest,
    check_manifest_exists,
    read_manifest,
    read_measurements,
)
from laconic.artifacts.placement import Placement
from laconic.artifacts.placement_audit import audit_placement, report_audit
from laconic.artifacts.verdict import Comparison, Verdict
from laconic.errors import ArtifactError, CorruptArtifact, LaconicError
from laconic.files import read_json
from laconic.hardware import this_machine
from laconic.runtimes.product import NOT_REPORTED
from laconic.runtimes.runtime import Runtime, find_kernel, make_runtime


class Check(BaseModel):
    """The outcome of one check: its name, what was found, and whether it passed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    check: str
    found: str
    passed: bool


class CheckpointReport(BaseModel):
    """The keys of a checkpoint's report.json that are shown to users."""

    task: str
    stages: tuple[StageEntry, ...]
    drift: Comparison


def summarize(artifact: Artifact) -> dict[str, Any]:
    """Summarize an artifact, JSON-ready: manifest and measurements without digests, size, layers per precision, and
    the figures after each stage."""
    manifest, measured = artifact.manifest, artifact.measured
    content = manifest.model_dump(mode="json", exclude={"files", "verdict"})
    return content | {
        "name": artifact.name,
        "path": str(artifact.path),
        "size": artifact.size,
        "layers": dict(Counter(manifest.precision.values()).most_common()),
        "stages": [entry.plain() for entry in make_ledger(manifest.source, manifest.history, measured.seconds)],
        "verdict": manifest.verdict and summarize_verdict(manifest.verdict),
        "measured": measured.model_dump(mode="json", exclude={"report", "products"}),
    }


def summarize_verdict(verdict: Verdict) -> dict[str, Any]:
    """Summarize a verdict, JSON-ready: its state, why it is not passed, and its comparisons."""
    summary = {"state": verdict.state, "failures": verdict.failures, "doubts": verdict.doubts}
    return summary | {"out_of_domain": verdict.out_of_domain} | verdict.model_dump(mode="json")


def read_report(folder: Path) -> dict[str, Any] | None:
    """Read the report of a compressed checkpoint, with the figures after each stage, JSON-ready. Returns None for any
    other folder. Raises ArtifactError for a report that cannot be read."""
    path = folder / JSON
    if (folder / MANIFEST).exists() or not path.is_file():
        return None
    try:
        content = read_json(path)
        CheckpointReport.model_validate(content)
    except (OSError, ValueError) as error:
        raise ArtifactError(
            f"{path} is not a report of Laconic, with a task, stages and drift. Compress the model again"
        ) from error
    return dict(content)


def count_kernels(artifact: Artifact, runtime: str | None = None) -> dict[str, Any]:
    """Count layers by planned precision and by the arithmetic of the kernel that runs, and audit the multiply-adds,
    JSON-ready: {"engine": ..., "layers": {planned: {running: count}}, "audit": ...}; for the last see `report_audit`.

    Layers whose kernel the engine does not report count as "not told". If no engine opens the artifact, "error" says
    why, and the audit is that of the machine where the artifact was made or tuned. Raises CorruptArtifact for files
    that are not as a task writes them.
    """
    measured = artifact.measured
    try:
        choice = artifact.choose(runtime)
        engine, placement = choice.engine, choice.placement
        with artifact.open_unchecked(engine, placement)[0] as session:
            # OpenVINO chooses kernels for dynamic shapes in the first run.
            session.run(artifact.golden(placement)[0][0])
            running = session.kernels()
    except CorruptArtifact:
        raise
    except LaconicError as error:
        audit = report_audit(measured.products, measured.machine.processor, measured.why_not_audited)
        return {"engine": None, "layers": {}, "error": str(error), "audit": audit}
    counts: dict[str, Counter[str]] = {}
    for node, planned in placement.precision.items():
        kernel = find_kernel(node, running)
        counts.setdefault(planned, Counter())[kernel.precision if kernel else "not told"] += 1
    layers = {planned: dict(running_counts.most_common()) for planned, running_counts in counts.items()}
    products = audit_placement(measured.products, artifact.manifest, placement, engine.name, running)
    audit = report_audit(products, this_machine().processor, NOT_REPORTED)
    return {"engine": f"{engine.name} {engine.version()}", "layers": layers, "audit": audit}


def verify(path: Path, runtime: str | None = None, key: Path | None = None) -> list[Check]:
    """Check digests, golden outputs and verdict on this machine. All failures are listed, not only the first.

    key: the public one of who must have signed the artifact, of which nothing is read otherwise. Raises ArtifactError
    if the folder holds no artifact, UsageError for a key that cannot be used.
    """
    check_manifest_exists(path)
    checks = []
    if key is not None:
        signed = f"of {key}, over every file"
        checks.append(run_check("signature", signed, partial(check_signature, path, read_public_key(key))))
        if not checks[0].passed:
            return checks
    try:
        manifest = read_manifest(path)
    except ArtifactError as error:
        return [*checks, Check(check=MANIFEST, found=str(error), passed=False)]
    checks.append(Check(check=MANIFEST, found=f"format {manifest.format}, as it was written", passed=True))
    checks += check_files(path, manifest)
    if all(check.passed for check in checks):
        artifact = Artifact.read(path)
        checks += list(check_golden_outputs(artifact, runtime))
    else:
        checks.append(Check(check="golden outputs", found="not run: a file is damaged", passed=False))
    verdict = manifest.verdict
    outcome = "; ".join([verdict.describe(), *verdict.out_of_domain]) if verdict else "none"
    return [*checks, Check(check="verdict", found=outcome, passed=verdict is not None and verdict.state != "failed")]


def check_files(path: Path, manifest: Manifest) -> Iterator[Check]:
    """Check the digest of each file, that the folder holds no other, and that no graph reads any other."""
    are_whole = True
    for name, expected in manifest.files.items():
        check = run_check(name, f"sha256 {expected.sha256[:12]}...", partial(check_digest, path / name, expected))
        are_whole &= check.passed
        yield check
    try:
        measured = read_measurements(path)
    except ArtifactError as error:
        yield Check(check=MEASURED, found=str(error), passed=False)
        return
    yield Check(check=MEASURED, found="as it was written", passed=True)
    artifact = Artifact(path, manifest, measured)
    if measured.report is not None:
        yield run_check(REPORT, "as it was written", artifact.read_report)
    yield run_check("other files", "none", partial(check_unlisted, path, artifact.listed))
    if are_whole:
        yield run_check("weights", "in files of the artifact", artifact.check_graphs)


def run_check(name: str, found: str, check: Callable[[], object]) -> Check:
    """Run a check that raises ArtifactError where it fails. found: what it finds where it passes."""
    try:
        check()
        return Check(check=name, found=found, passed=True)
    except ArtifactError as error:
        return Check(check=name, found=str(error), passed=False)


def check_golden_outputs(artifact: Artifact, runtime: str | None) -> Iterator[Check]:
    """Check the golden outputs in an engine on this machine, and compare the engine's version with the recorded one. By
    default those of every placement whose engine is installed."""
    placements = artifact.manifest.placements
    if runtime is None and (installed := [each for each in placements if is_installed(each.runtime)]):
        for placement in installed:
            yield from check_placement(artifact, make_runtime(placement.runtime), placement)
        return
    try:
        choice = artifact.choose(runtime)
    except LaconicError as error:
        yield Check(check="golden outputs", found=f"not run: {error}", passed=False)
        return
    yield from check_placement(artifact, choice.engine, choice.placement)


def check_placement(artifact: Artifact, engine: Runtime, placement: Placement) -> Iterator[Check]:
    """Check the golden outputs of one placement in an engine, and the engine's version."""
    version, before = engine.version(), artifact.manifest.versions.get(engine.name)
    try:
        with artifact.open_unchecked(engine, placement)[0] as session:
            agreements = artifact.measure_golden_agreement(session, placement)
        figures = ", ".join(f"{name} {value:.6f}" for name, value in agreements.items())
        floor = find_golden_floor(placement.verdict)
        outcome = f"agreement of {figures} in {engine.name}, required {floor:g}"
        yield Check(check="golden outputs", found=outcome, passed=min(agreements.values()) >= floor)
    except LaconicError as error:
        yield Check(check="golden outputs", found=str(error), passed=False)
    if before is None:
        outcome = f"{engine.name} {version}; the artifact was made for {placement.runtime}"
    else:
        outcome = f"{engine.name} {version}" + (", as recorded" if version == before else f"; recorded: {before}")
    yield Check(check="engine", found=outcome, passed=True)
