"""Look at artifacts: what one is, whether it still is what was written, how fast several are side by side."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from laconic import registry
from laconic.artifacts.artifact import MANIFEST, MEASURED, REPORT, Artifact, Manifest, read_manifest, read_measured
from laconic.artifacts.ledger import JSON, StageEntry, make_ledger
from laconic.artifacts.verdict import Comparison
from laconic.cache import Cache
from laconic.errors import ArtifactError, LaconicError, UsageError
from laconic.hashing import check_digest, digest
from laconic.progress import Steps
from laconic.recipes.recipe import Recipe
from laconic.runtimes.runtime import Session, kernel_of
from laconic.timing.measurements import ORIGINAL, Timing
from laconic.timing.race import race


class Check(BaseModel):
    """One thing that was looked at, what was found, and whether it is as it should be."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    check: str
    found: str
    passed: bool


class CheckpointReport(BaseModel):
    """What is shown of the report beside a checkpoint."""

    task: str
    stages: tuple[StageEntry, ...]
    drift: Comparison


def summary(artifact: Artifact) -> dict[str, Any]:
    """What an artifact is, JSON-ready: the manifest and what was measured, without digests, with what is counted."""
    manifest, measured = artifact.manifest, artifact.measured
    content = manifest.model_dump(mode="json", exclude={"files", "verdict"})
    verdict = manifest.verdict
    return content | {
        "name": artifact.name,
        "path": str(artifact.path),
        "size": artifact.size,
        "layers": dict(Counter(manifest.precision.values()).most_common()),
        "stages": [entry.plain() for entry in make_ledger(manifest.source, manifest.history, measured.seconds)],
        "verdict": verdict
        and {"passed": verdict.passed, "failures": verdict.failures, **verdict.model_dump(mode="json")},
        "measured": measured.model_dump(mode="json", exclude={"report"}),
    }


def report_of(folder: Path) -> dict[str, Any] | None:
    """What was written beside a checkpoint that was compressed: what each stage gained and cost, JSON-ready. None for
    anything else. Raises ArtifactError for a report that cannot be read."""
    path = folder / JSON
    if (folder / MANIFEST).exists() or not path.is_file():
        return None
    try:
        content = path.read_bytes()
        CheckpointReport.model_validate_json(content)
    except (OSError, ValueError) as error:
        raise ArtifactError(
            f"{path} is not a report as Laconic writes them, with a task, stages and drift. Compress the model again"
        ) from error
    return dict(json.loads(content))


def kernels(artifact: Artifact, runtime: str | None = None) -> dict[str, Any]:
    """Which kernels run at which precision: {"engine": ..., "layers": {planned: {running: how many}}}, JSON-ready.

    What the engine does not tell of is counted as "not told". Where no engine opens the artifact, "error" says why.
    """
    try:
        engine = artifact.runtime(runtime)
        with engine.open(artifact.model, compute=artifact.manifest.compute) as session:
            running = session.kernels()
    except LaconicError as error:
        return {"engine": None, "layers": {}, "error": str(error)}
    counts: dict[str, Counter[str]] = {}
    for node, planned in artifact.manifest.precision.items():
        kernel = kernel_of(node, running)
        counts.setdefault(planned, Counter())[kernel.precision if kernel else "not told"] += 1
    layers = {planned: dict(found.most_common()) for planned, found in counts.items()}
    return {"engine": f"{engine.name} {engine.version()}", "layers": layers}


def verify(path: Path, runtime: str | None = None) -> list[Check]:
    """Check everything again, on this machine. Each damage is named, not the first alone.

    Raises ArtifactError where there is no artifact at all.
    """
    if not (path / MANIFEST).is_file():
        raise ArtifactError(f"{path} is not an artifact: it holds no {MANIFEST}. `laconic compress` makes one")
    try:
        manifest = read_manifest(path)
    except ArtifactError as error:
        return [Check(check=MANIFEST, found=str(error), passed=False)]
    checks = [Check(check=MANIFEST, found=f"format {manifest.format}, as it was written", passed=True)]
    checks += files(path, manifest)
    if all(check.passed for check in checks):
        artifact = Artifact.load(path)
        checks += list(answers(artifact, runtime))
    else:
        checks.append(Check(check="golden answers", found="not asked: a file is damaged", passed=False))
    verdict = manifest.verdict
    found = "none" if verdict is None else "; ".join(verdict.failures) or "passed when it was made"
    return [*checks, Check(check="verdict", found=found, passed=verdict is not None and verdict.passed)]


def files(path: Path, manifest: Manifest) -> Iterator[Check]:
    """Whether each file is the one that was written."""
    for name, expected in manifest.files.items():
        try:
            check_digest(path / name, expected)
            yield Check(check=name, found=f"sha256 {expected.sha256[:12]}...", passed=True)
        except ArtifactError as error:
            yield Check(check=name, found=str(error), passed=False)
    try:
        measured = read_measured(path)
    except ArtifactError as error:
        yield Check(check=MEASURED, found=str(error), passed=False)
        return
    yield Check(check=MEASURED, found="as it was written", passed=True)
    if measured.report is not None:
        same = (path / REPORT).is_file() and digest(path / REPORT).sha256 == measured.report
        yield Check(check=REPORT, found="as it was written" if same else "missing or changed", passed=same)


def answers(artifact: Artifact, runtime: str | None) -> Iterator[Check]:
    """Whether an engine on this machine gives the golden answers, and whether it is the engine of back then."""
    engine = artifact.runtime(runtime)
    version, before = engine.version(), artifact.manifest.versions.get(engine.name)
    try:
        with engine.open(artifact.model, compute=artifact.manifest.compute) as session:
            worst = artifact.golden_fidelity(session)
        found = f"fidelity {worst:.6f} in {engine.name}, required {artifact.golden_floor:.4g}"
        yield Check(check="golden answers", found=found, passed=worst >= artifact.golden_floor)
    except LaconicError as error:
        yield Check(check="golden answers", found=str(error), passed=False)
    if before is None:
        found = f"{engine.name} {version}; it was made for {artifact.manifest.placement}"
    else:
        found = f"{engine.name} {version}" + (", as back then" if version == before else f"; back then {before}")
    yield Check(check="engine", found=found, passed=True)


def batch_sizes(text: str) -> tuple[int, ...]:
    """Of "1,8,32". Raises UsageError for anything but whole numbers from 1."""
    try:
        sizes = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise UsageError(f"--batches must be whole numbers with commas between them, as 1,8,32, not {text!r}")
    return sizes


def bench(
    paths: Sequence[Path],
    original: Path | None = None,
    *,
    threads: int = 1,
    length: int = 128,
    batches: tuple[int, ...] = (1, 8, 32),
    rounds: int = 15,
    runtime: str | None = None,
    trust: bool = False,
) -> list[Timing]:
    """Time artifacts side by side: in each round each runs once. Speed-ups are against the original where it is given,
    else against the first artifact.

    Raises UsageError for artifacts that do not take the same inputs.
    """
    artifacts = [Artifact.load(path) for path in paths]
    for artifact in artifacts:
        check_alike(artifacts[0], artifact)
    with ExitStack() as stack:
        sessions: dict[str, Session] = {}
        if original is not None:
            sessions[ORIGINAL] = stack.enter_context(open_original(original, artifacts[0], threads, trust=trust))
        for artifact in artifacts:
            session = stack.enter_context(artifact.open(runtime, threads=threads))
            sessions[name_of(artifact, runtime, sessions)] = session
        with Steps().step("bench", len(batches)) as step:
            return race(
                sessions,
                artifacts[0].task(),
                baseline=next(iter(sessions)),
                batches=batches,
                threads=threads,
                step=step,
                length=length,
                rounds=rounds,
                patience=math.inf,
            )


def check_alike(first: Artifact, other: Artifact) -> None:
    """Raise UsageError unless two artifacts take the same inputs."""
    wanted, found = ([(spec.name, spec.dtype, spec.shape) for spec in x.manifest.inputs] for x in (first, other))
    if wanted != found:
        raise UsageError(
            f"{other.path} takes {[spec.describe() for spec in other.manifest.inputs]}, {first.path} takes "
            f"{[spec.describe() for spec in first.manifest.inputs]}: they cannot be timed on the same inputs"
        )


def name_of(artifact: Artifact, runtime: str | None, taken: dict[str, Session]) -> str:
    """What an artifact is called among the timings; the second of a name has its folder with it."""
    engine = f"{artifact.runtime(runtime).name}, {artifact.manifest.compute}"
    name = f"{artifact.name} ({engine})"
    return name if name not in taken else f"{artifact.path} ({engine})"


def open_original(path: Path, artifact: Artifact, threads: int, *, trust: bool) -> Session:
    """The model that an artifact was made from, in full precision."""
    made = artifact.manifest.source
    given: dict[str, Any] = {"source": str(path), "task": artifact.manifest.task, "stages": []}
    if made.get("kind") == "builder":
        given |= {"builder": made["builder"], "arguments": made["arguments"], "inputs": artifact.manifest.inputs}
    source = registry.load("laconic.models.source:open_source")(Recipe.parse(given), Cache(), trust=trust)
    session: Session = source.open(threads)
    return session
