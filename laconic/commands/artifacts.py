"""Commands on artifacts: `inspect`, `verify`, `bench`, `serve`, `compare`."""

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from laconic.commands.options import ArtifactPath, Builder, Data, Json, RuntimeName, Threads, Trust
from laconic.commands.output import print_json
from laconic.errors import GoalMissed, UsageError


def inspect(artifact: ArtifactPath, runtime: RuntimeName = None, as_json: Json = False) -> None:
    """Describe an artifact: signature, precision, kernels, history, size, speed, verdict.

    For a compressed checkpoint, show size and fidelity after each stage.
    """
    from laconic.artifacts.artifact import Artifact
    from laconic.artifacts.inspection import count_kernels, read_report, summarize
    from laconic.commands.tables import print_artifact, print_checkpoint

    report = read_report(artifact)
    if report is not None:
        print_json(report) if as_json else print_checkpoint(artifact, report)
        return
    opened = Artifact.load(artifact)
    kernels = count_kernels(opened, runtime)
    print_json(summarize(opened) | {"kernels": kernels}) if as_json else print_artifact(opened, kernels)


def verify(artifact: ArtifactPath, runtime: RuntimeName = None, as_json: Json = False) -> None:
    """Check the digests, golden outputs and verdict of an artifact on this machine.

    All checks are listed; the exit code is 3 if one fails.
    """
    from laconic.artifacts.inspection import verify
    from laconic.commands.tables import print_checks

    checks = verify(artifact, runtime)
    print_json([check.model_dump() for check in checks]) if as_json else print_checks(checks)
    failed = [check.check for check in checks if not check.passed]
    if failed:
        raise GoalMissed(f"{artifact} failed verification: {', '.join(failed)}")


def bench(
    artifacts: Annotated[list[Path], typer.Argument(help="Folders of artifacts.", metavar="ARTIFACT")],
    original: Annotated[Path | None, typer.Option(help="The source model, to time as well.")] = None,
    threads: Threads = 1,
    length: Annotated[int, typer.Option(min=1, help="Size of the dynamic axes, as tokens of a text.")] = 128,
    batches: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "1,8,32",
    rounds: Annotated[int, typer.Option(min=1, help="Timed runs per artifact and batch size.")] = 15,
    runtime: RuntimeName = None,
    builder: Builder = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Measure latency and throughput of artifacts in one interleaved run.

    Speed-ups are relative to the original if --original is given, else to the first artifact.
    """
    from laconic.artifacts.bench import bench
    from laconic.commands.tables import print_timings

    sizes = parse_batches(batches)
    with ExitStack() as stack:
        session = None
        if original is not None:
            from export.sources import open_original

            session = stack.enter_context(open_original(original, artifacts[0], threads, builder=builder, trust=trust))
        timings = bench(
            artifacts, session, threads=threads, length=length, batches=sizes, rounds=rounds, runtime=runtime
        )
    print_json([timing.model_dump() for timing in timings]) if as_json else print_timings(timings)


def parse_batches(text: str) -> tuple[int, ...]:
    """Parse batch sizes, "1,8,32". Raises UsageError for anything but positive integers."""
    try:
        sizes = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise UsageError(f"--batches must be positive integers separated by commas, as 1,8,32, not {text!r}")
    return sizes


def serve(
    artifacts: Annotated[list[Path], typer.Argument(help="Folders of artifacts.", metavar="ARTIFACT")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 chooses a free one.")] = 8000,
    runtime: RuntimeName = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Cores to use; default: all.")] = None,
    unproven: Annotated[bool, typer.Option("--unproven", help="Serve artifacts without a passed verdict.")] = False,
    settings: Annotated[Path | None, typer.Option(help="YAML file with limits and other settings.")] = None,
    queue_seconds: Annotated[float | None, typer.Option(help="Longest expected wait of a request; default: 1.")] = None,
    deadline: Annotated[
        float | None, typer.Option(help="Seconds after which a waiting request fails; default: 60.")
    ] = None,
    max_body: Annotated[str | None, typer.Option(help="Largest body of a request; default: 64 MiB.")] = None,
    max_connections: Annotated[int | None, typer.Option(help="Most connections at a time; default: 1000.")] = None,
) -> None:
    """Serve artifacts over HTTP, with dynamic batching."""
    from serve.server import serve

    serve(
        artifacts,
        host=host,
        port=port,
        settings=settings,
        runtime=runtime,
        threads=threads,
        unproven=unproven or None,
        queue_seconds=queue_seconds,
        deadline=deadline,
        max_body=max_body,
        max_connections=max_connections,
    )


def compare(
    first: Annotated[Path, typer.Argument(help="Folder of the first artifact.", metavar="A")],
    second: Annotated[Path, typer.Argument(help="Folder of the second artifact.", metavar="B")],
    data: Data = None,
    runtime: RuntimeName = None,
    as_json: Json = False,
) -> None:
    """Compare two artifacts: size, speed, fidelity, precision, stages, settings.

    With --data, both run on the same samples and their outputs are compared.
    """
    from laconic.artifacts.compare import compare
    from laconic.commands.tables import print_comparison

    found = compare(first, second, data, runtime)
    print_json(found) if as_json else print_comparison(found)
