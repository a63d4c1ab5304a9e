"""What is done with artifacts that are there."""

from pathlib import Path
from typing import Annotated

import typer

from laconic import registry
from laconic.commands.options import ArtifactPath, Data, Json, RuntimeName, Threads, Trust
from laconic.commands.output import print_json
from laconic.errors import GoalMissed


def inspect(artifact: ArtifactPath, runtime: RuntimeName = None, as_json: Json = False) -> None:
    """What an artifact is: signature, precision, kernels, history, sizes, speed, verdict; or what a checkpoint that was
    compressed has been through."""
    report = registry.load("laconic.artifacts.inspection:report_of")(artifact)
    if report is not None:
        print_json(report) if as_json else registry.load("laconic.commands.tables:reduced")(artifact, report)
        return
    opened = registry.load("laconic.artifacts.artifact:Artifact").load(artifact)
    kernels = registry.load("laconic.artifacts.inspection:kernels")(opened, runtime)
    if as_json:
        print_json(registry.load("laconic.artifacts.inspection:summary")(opened) | {"kernels": kernels})
        return
    registry.load("laconic.commands.tables:inspected")(opened, kernels)


def verify(artifact: ArtifactPath, runtime: RuntimeName = None, as_json: Json = False) -> None:
    """Digests, golden answers and verdict, again, on this machine.

    Exit code 3 where a check fails; each of them is listed.
    """
    checks = registry.load("laconic.artifacts.inspection:verify")(artifact, runtime)
    if as_json:
        print_json([check.model_dump() for check in checks])
    else:
        registry.load("laconic.commands.tables:checked")(checks)
    failed = [check.check for check in checks if not check.passed]
    if failed:
        raise GoalMissed(f"{artifact} did not pass: {', '.join(failed)}")


def bench(
    artifacts: Annotated[list[Path], typer.Argument(help="Folders of artifacts.", metavar="ARTIFACT")],
    original: Annotated[Path | None, typer.Option(help="The source that they were made from, to compare with.")] = None,
    threads: Threads = 1,
    length: Annotated[int, typer.Option(min=1, help="Of the free axes, as tokens of a text.")] = 128,
    batches: Annotated[str, typer.Option(help="Batch sizes, with commas between them.")] = "1,8,32",
    rounds: Annotated[int, typer.Option(min=1, help="How often each is run.")] = 15,
    runtime: RuntimeName = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Latency and throughput, side by side in one interleaved run.

    Speed-ups are against the original where --original is given, else against the first artifact.
    """
    sizes = registry.load("laconic.artifacts.inspection:batch_sizes")(batches)
    timings = registry.load("laconic.artifacts.inspection:bench")(
        artifacts,
        original,
        threads=threads,
        length=length,
        batches=sizes,
        rounds=rounds,
        runtime=runtime,
        trust=trust,
    )
    if as_json:
        print_json([timing.model_dump() for timing in timings])
        return
    registry.load("laconic.commands.tables:timed")(timings)


def serve(
    artifacts: Annotated[list[Path], typer.Argument(help="Folders of artifacts.", metavar="ARTIFACT")],
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0 takes a free one.")] = 8000,
    runtime: RuntimeName = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Cores to use; by default all.")] = None,
    unproven: Annotated[bool, typer.Option("--unproven", help="Serve artifacts whose verdict failed.")] = False,
) -> None:
    """Answer over HTTP, with dynamic batching."""
    registry.load("serve.server:serve")(
        artifacts, host=host, port=port, runtime=runtime, threads=threads, unproven=unproven
    )


def compare(
    first: Annotated[Path, typer.Argument(help="Folder of an artifact.", metavar="A")],
    second: Annotated[Path, typer.Argument(help="Folder of another one.", metavar="B")],
    data: Data = None,
    runtime: RuntimeName = None,
    as_json: Json = False,
) -> None:
    """Two artifacts side by side: size, speed, fidelity, precision, stages, settings.

    With --data both answer the same samples, and their answers are compared.
    """
    found = registry.load("laconic.artifacts.compare:compare")(first, second, data, runtime)
    if as_json:
        print_json(found)
        return
    registry.load("laconic.commands.tables:compared")(found)
