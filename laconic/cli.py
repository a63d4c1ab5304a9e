"""The command `laconic`: parse, call one function, show, translate a known error into one sentence."""

import json
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import click
import typer

from laconic import __version__, registry
from laconic.errors import GoalMissed, LaconicError
from laconic.rooms import check_rooms

app = typer.Typer(
    name="laconic",
    help="The same answers, with fewer bits: compress a trained checkpoint, prove it, serve it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

Output = Annotated[Path, typer.Option("--output", "-o", help="Folder of the artifact to write.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
ArtifactPath = Annotated[Path, typer.Argument(help="Folder of an artifact.", metavar="ARTIFACT")]
Trust = Annotated[bool, typer.Option("--trust", help="Run code that the source carries: pickles, remote code.")]
Task = Annotated[str | None, typer.Option(help="What the model is for; by default as the source says.")]
Builder = Annotated[str | None, typer.Option(help='"package.module:factory" that builds your own module.')]
Data = Annotated[Path | None, typer.Option(help="File or folder of samples: jsonl, csv, parquet, npz, txt, images.")]
Threads = Annotated[int, typer.Option(min=1, help="Threads of each engine.")]
RuntimeName = Annotated[str | None, typer.Option("--runtime", help="Engine; by default the one it was written for.")]


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    """The same answers, with fewer bits: compress a trained checkpoint, prove it, serve it."""
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command()
def compress(
    output: Output,
    source: Annotated[str | None, typer.Argument(help="A checkpoint's folder, a weights file, an ONNX file.")] = None,
    data: Data = None,
    recipe: Annotated[Path | None, typer.Option(help="YAML file; what is given here stands above it.")] = None,
    task: Task = None,
    builder: Builder = None,
    target: Annotated[str | None, typer.Option(help="What to compress for: cpu.")] = None,
    fidelity: Annotated[float | None, typer.Option(min=0, max=1, help="Mean fidelity to reach, as 0.999.")] = None,
    trust: Trust = False,
    show_recipe: Annotated[bool, typer.Option("--show-recipe", help="Print what would run, and stop.")] = False,
    as_json: Json = False,
) -> None:
    """Make a checkpoint smaller and faster, and prove that its answers are the same."""
    given = {"source": source, "task": task, "builder": builder, "target": target, "data": data and str(data)}
    chosen = read_recipe(recipe, {key: value for key, value in given.items() if value is not None}, fidelity)
    if show_recipe:
        typer.echo(chosen.to_yaml(), nl=False)
        return
    result = registry.load("laconic.pipeline:compress")(chosen, output, trust=trust)
    finish(result, as_json)


@app.command()
def export(
    source: Annotated[str, typer.Argument(help="A checkpoint's folder, a weights file, an ONNX file.")],
    output: Output,
    data: Data = None,
    task: Task = None,
    builder: Builder = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Only capture, engine, validation: the same model in full precision, as an artifact."""
    given: dict[str, Any] = {"source": source, "task": task, "builder": builder, "stages": []}
    given["data"] = data and str(data)
    chosen = read_recipe(None, {key: value for key, value in given.items() if value is not None}, 0.9999)
    result = registry.load("laconic.pipeline:compress")(chosen, output, trust=trust)
    finish(result, as_json)


@app.command()
def inspect(artifact: ArtifactPath, as_json: Json = False) -> None:
    """What an artifact is: signature, history, sizes, speed, verdict."""
    opened = registry.load("laconic.artifact:Artifact").load(artifact)
    if as_json:
        print_json(registry.load("laconic.inspection:summary")(opened))
        return
    registry.load("laconic.show:inspected")(opened)


@app.command()
def verify(artifact: ArtifactPath, runtime: RuntimeName = None, as_json: Json = False) -> None:
    """Digests, golden answers and verdict, again, on this machine."""
    checks = registry.load("laconic.inspection:verify")(artifact, runtime)
    if as_json:
        print_json(checks)
    else:
        for check in checks:
            typer.echo(f"{'ok    ' if check['passed'] else 'FAILED'} {check['check']}: {check['found']}")
    if not all(check["passed"] for check in checks):
        raise GoalMissed(f"{artifact} did not pass every check on this machine")


@app.command()
def bench(
    artifacts: Annotated[list[Path], typer.Argument(help="Folders of artifacts.", metavar="ARTIFACT...")],
    original: Annotated[Path | None, typer.Option(help="The source that they were made from, to compare with.")] = None,
    threads: Threads = 1,
    length: Annotated[int, typer.Option(min=1, help="Of the free axes, as tokens of a text.")] = 128,
    batches: Annotated[str, typer.Option(help="Batch sizes.")] = "1,8,32",
    rounds: Annotated[int, typer.Option(min=1, help="How often each is run.")] = 15,
    as_json: Json = False,
) -> None:
    """Latency and throughput, side by side in one interleaved run."""
    sizes = registry.load("laconic.inspection:batch_sizes")(batches)
    timings = registry.load("laconic.inspection:bench")(
        artifacts, original, threads=threads, length=length, batches=sizes, rounds=rounds
    )
    if as_json:
        print_json([timing.model_dump() for timing in timings])
        return
    show = registry.load("laconic.show:timing_table")
    registry.load("laconic.show:OUT").print(show(timings, "median of interleaved rounds (quartiles)"))


@app.command()
def serve(
    artifacts: Annotated[list[Path], typer.Argument(help="Folders of artifacts.", metavar="ARTIFACT...")],
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


@app.command()
def doctor(as_json: Json = False) -> None:
    """Which engines work here, and for each that does not, why."""
    checks = registry.load("laconic.doctor:examine")()
    if as_json:
        print_json(checks)
        return
    for check in checks:
        typer.echo(f"{'ok     ' if check['works'] else 'missing'} {check['name']:<24} {check['found']}")


@app.command()
def schema() -> None:
    """The JSON Schema of a recipe, for editors to complete it by."""
    print_json(registry.load("laconic.recipe:json_schema")())


def read_recipe(path: Path | None, given: dict[str, Any], fidelity: float | None) -> Any:
    """The recipe of a file, or the default one; what is given on the command line stands above it."""
    kind = registry.load("laconic.recipe:Recipe")
    if path is None and "source" not in given:
        raise click.UsageError("give a SOURCE, or a --recipe that names one")
    chosen = kind.load(path, **given) if path else kind.parse(given, where="command line")
    if fidelity is None:
        return chosen
    return chosen.model_copy(update={"goal": chosen.goal.model_copy(update={"fidelity": fidelity})})


def finish(result: Any, as_json: bool) -> None:
    """Show an artifact that was written; raise GoalMissed for what it misses."""
    if as_json:
        print_json(registry.load("laconic.inspection:summary")(result.artifact) | {"missed": list(result.missed)})
    else:
        registry.load("laconic.show:compressed")(result.artifact)
    if result.missed:
        raise GoalMissed(
            f"the goal was missed: {'; '.join(result.missed)}. The best result is in {result.artifact.path}. "
            f"Try a lower --fidelity, or more --data"
        )


def print_json(value: Any) -> None:
    """On the standard output stream."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def stop(number: int, frame: object) -> NoReturn:
    """Let a polite request to stop unwind the stack, so that what is half written is removed."""
    raise KeyboardInterrupt


def main() -> NoReturn:
    """The console script."""
    signal.signal(signal.SIGTERM, stop)
    try:
        check_rooms()
        code = app(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except LaconicError as error:
        fail(str(error), error.exit_code)
    except click.ClickException as error:
        fail(error.format_message(), 2)
    except (KeyboardInterrupt, click.Abort):
        fail("interrupted. What was finished is kept, and the same command goes on from there", 130)
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:
        fail(f"{error.filename or 'the system'}: {error.strerror or error}. Nothing half-written was left", 1)


def fail(message: str, code: int) -> NoReturn:
    """One sentence on the error stream, and the exit code."""
    typer.echo(f"laconic: {message}", err=True)
    sys.exit(code)
