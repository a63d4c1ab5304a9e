"""Commands on artifacts: `inspect`, `sign`, `package`, `bench`, `compare`, `lint`."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from laconic.commands.options import ArtifactPath, Builder, Data, Json, RuntimeName, Threads, Trust, print_json
from laconic.errors import GoalMissed, UsageError

if TYPE_CHECKING:
    from laconic.runtimes.runtime import Session

LOAD = "A running server"
"""Panel of the help."""


Clients = Annotated[str, typer.Option(help="Clients that wait for their answers (closed loop).", rich_help_panel=LOAD)]
Rates = Annotated[str | None, typer.Option(help="Requests per second instead (open loop).", rich_help_panel=LOAD)]
LoadSamples = Annotated[
    Path | None, typer.Option(help="Samples: .txt, or .jsonl of request bodies.", rich_help_panel=LOAD)
]
Key = Annotated[str | None, typer.Option(help="Key of the server.", envvar="LACONIC_KEY", rich_help_panel=LOAD)]
Chart = Annotated[Path | None, typer.Option(help="SVG file of the saturation curve to write.", rich_help_panel=LOAD)]


def inspect(artifact: ArtifactPath, runtime: RuntimeName = None, as_json: Json = False) -> None:
    """Describe an artifact: signature, precision, kernels, history, size, speed, verdict.

    For a compressed checkpoint, show size and fidelity after each stage; for an ONNX file, what it takes, and what to
    type to compress it.
    """
    from laconic.artifacts.artifact import Artifact
    from laconic.artifacts.inspection import count_kernels, read_report, summarize
    from laconic.commands.tables import print_artifact, print_checkpoint

    if artifact.suffix.lower() == ".onnx" and artifact.is_file():
        from export.capture.onnx_summary import summarize_onnx
        from laconic.commands.tables import print_onnx

        summary = summarize_onnx(artifact)
        print_json(summary) if as_json else print_onnx(summary)
        return
    report = read_report(artifact)
    if report is not None:
        print_json(report) if as_json else print_checkpoint(artifact, report)
        return
    opened = Artifact.load(artifact)
    kernels = count_kernels(opened, runtime)
    print_json(summarize(opened) | {"kernels": kernels}) if as_json else print_artifact(opened, kernels)


def sign(
    artifact: ArtifactPath,
    key: Annotated[Path, typer.Option(help="Private key: elliptic curve (P-256), in PEM.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Sign an artifact: every file of it, in the format of OpenSSF model signing, into its model.sig.

    A changed artifact, as by `laconic tune`, has to be signed again.
    """
    from laconic.artifacts.artifact import Artifact
    from laconic.artifacts.artifact_signature import sign_artifact

    signature = sign_artifact(Artifact.load(artifact).path, key)
    print_json({"signature": str(signature)}) if as_json else typer.echo(f"Signed: {signature}")


def package(
    artifacts: Annotated[list[str], typer.Argument(help="Folders of artifacts.", metavar="[NAME=]ARTIFACT...")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the build context to write.")],
    require_signature: Annotated[
        Path | None, typer.Option(help="Public key (PEM) of who must have signed each artifact.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the build context of an image that holds artifacts at /models and serves them.

    KServe takes the image by its oci:// address. The same artifacts give the same bytes.
    """
    from laconic.artifacts.image_context import write_context

    digests = write_context(artifacts, output, require_signature)
    if as_json:
        print_json({"context": str(output), "models": digests})
        return
    for name, digest in digests.items():
        typer.echo(f"{name}  sha256:{digest}")
    typer.echo(f"Try: docker build -t {next(iter(digests)).lower()} {output}")


def bench(
    artifacts: Annotated[list[Path] | None, typer.Argument(help="Folders of artifacts.", metavar="[ARTIFACT]")] = None,
    original: Annotated[Path | None, typer.Option(help="The source model, to time as well.")] = None,
    threads: Threads = 1,
    length: Annotated[int, typer.Option(min=1, help="Size of the dynamic axes, as tokens of a text.")] = 128,
    batches: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "1,8,32",
    rounds: Annotated[int, typer.Option(min=1, help="Timed runs per artifact and batch size.")] = 15,
    runtime: RuntimeName = None,
    builder: Builder = None,
    trust: Trust = False,
    url: Annotated[str | None, typer.Option(help="Address of a server to load instead.", rich_help_panel=LOAD)] = None,
    model: Annotated[str | None, typer.Option(help="Model of the server.", rich_help_panel=LOAD)] = None,
    clients: Clients = "1,4,16,64",
    rate: Rates = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds of each load.", rich_help_panel=LOAD)] = 5.0,
    data: LoadSamples = None,
    key: Key = None,
    chart: Chart = None,
    as_json: Json = False,
) -> None:
    """Measure latency and throughput of artifacts in one interleaved run, or of a running server (--url).

    Speed-ups are relative to the original if --original is given, else to the first artifact.
    """
    from laconic.commands.tables import print_load, print_timings

    if url is not None:
        if artifacts or original is not None:
            raise UsageError("--url measures a server, not artifacts. Give one of the two")
        from laconic.commands.load import bench_server

        loads = {"clients": parse_sizes("--clients", clients), "rates": parse_sizes("--rate", rate) if rate else ()}
        options = {"model": model, "seconds": seconds, "length": length, "data": data, "key": key}
        points = bench_server(url, **loads, **options)
        if chart is not None:
            from laconic.loadtest.saturation_chart import draw_saturation

            draw_saturation(points, url, chart)
        print_json([point.model_dump() for point in points]) if as_json else print_load(points)
        return
    if not artifacts:
        raise UsageError("nothing to measure. Give folders of artifacts, or the --url of a server")
    from laconic.artifacts.bench import bench

    sizes = parse_sizes("--batches", batches)
    with open_timed(original, artifacts[0], threads, builder=builder, trust=trust) as session:
        timings = bench(
            artifacts, session, threads=threads, length=length, batches=sizes, rounds=rounds, runtime=runtime
        )
    print_json([timing.model_dump() for timing in timings]) if as_json else print_timings(timings)


def open_timed(
    original: Path | None, artifact: Path, threads: int, *, builder: str | None, trust: bool
) -> "AbstractContextManager[Session | None]":
    """Open a session of the source of an artifact, to time it as well; None without one."""
    if original is None:
        return nullcontext()
    from export.sources import open_original

    return open_original(original, artifact, threads, builder=builder, trust=trust)


def parse_sizes(option: str, text: str) -> tuple[int, ...]:
    """Parse sizes, "1,8,32". Raises UsageError for anything but positive integers."""
    try:
        sizes = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise UsageError(f"{option} must be positive integers separated by commas, as 1,8,32, not {text!r}")
    return sizes


def tune(
    artifact: ArtifactPath,
    original: Annotated[Path | None, typer.Option(help="The source model, to time as well.")] = None,
    threads: Threads = 1,
    builder: Builder = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Time an artifact's engines on this machine again, and write what is found into it.

    For an artifact that was made on another machine, or for an engine that was not there. The graph, the golden outputs
    and the verdict stay as they are; the exit code is 3 if the verdict failed.
    """
    from laconic.artifacts.bench import tune
    from laconic.commands.tables import print_timings

    with open_timed(original, artifact, threads, builder=builder, trust=trust) as session:
        tuned = tune(artifact, session, threads=threads)
    timings = tuned.measured.timings
    print_json([timing.model_dump() for timing in timings]) if as_json else print_timings(timings)
    if (verdict := tuned.manifest.verdict) is not None and verdict.state == "failed":
        raise GoalMissed(f"{artifact} was timed, and is still not to be served: its verdict is {verdict.describe()}")


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

    comparison = compare(first, second, data, runtime)
    print_json(comparison) if as_json else print_comparison(comparison)


def lint(
    model: Annotated[Path, typer.Argument(help="Folder of an artifact, or an ONNX file.", metavar="ARTIFACT_OR_ONNX")],
    target: Annotated[str, typer.Option(help="Target that the graph is for.")] = "tensorrt",
    as_json: Json = False,
) -> None:
    """Say, without a GPU, why TensorRT would refuse a graph, or what would leave INT8 or FP8.

    The exit code is 3 if there is an error.
    """
    from export.lint.tensorrt_lint import count_quantized, count_sparse_layers, lint_tensorrt
    from laconic.artifacts.artifact import Artifact
    from laconic.commands.tables import print_lint

    if target != "tensorrt":
        raise UsageError(f"there are no lint rules for target {target!r}. Known: tensorrt")
    path = Artifact.load(model).model_for(target) if model.is_dir() else model
    findings = lint_tensorrt(path)
    report = {
        "model": str(path),
        "target": target,
        "findings": [asdict(finding) for finding in findings],
        "quantized": asdict(count_quantized(path)),
        "sparse": asdict(count_sparse_layers(path)),
    }
    print_json(report) if as_json else print_lint(report)
    errors = [finding.rule for finding in findings if finding.severity == "error"]
    if errors:
        raise GoalMissed(f"{path} is not fit for {target}: {', '.join(dict.fromkeys(errors))}")
