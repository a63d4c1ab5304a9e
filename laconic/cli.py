"""The command `laconic`: parse, call one function, show, translate a known error into one sentence."""

import errno
import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from laconic import __version__, registry
from laconic.errors import GoalMissed, LaconicError, UsageError
from laconic.rooms import check_rooms

INTERRUPTED = 130
"""The exit code that shells give to what was stopped by Ctrl-C."""

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
ROOM_HINT = ". Nothing half-written was left. Make room, and the same command goes on from there"

EXPORT_FIDELITY = 0.9999
"""What an export in full precision must reach: FP32 of two engines differs by less than 1e-5, BF16 by 3e-5."""

app = typer.Typer(
    name="laconic",
    help="The same answers, with fewer bits: compress a trained checkpoint, prove it, serve it.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Source = Annotated[
    str, typer.Argument(help="A checkpoint's folder, a weights file, or an ONNX file.", metavar="SOURCE")
]
Output = Annotated[Path, typer.Option("--output", "-o", help="Folder of the artifact to write.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
ArtifactPath = Annotated[Path, typer.Argument(help="Folder of an artifact.", metavar="ARTIFACT")]
Trust = Annotated[bool, typer.Option("--trust", help="Run code that the source carries: pickles, remote code.")]
Task = Annotated[str | None, typer.Option(help="What the model is for; by default what the source says.")]
Builder = Annotated[str | None, typer.Option(help='"package.module:factory" that builds your own module.')]
Data = Annotated[
    Path | None, typer.Option(help="Samples: a .jsonl, .csv, .parquet, .npz, .txt, or a folder of images.")
]
Threads = Annotated[int, typer.Option(min=1, help="Threads of each engine.")]
RuntimeName = Annotated[str | None, typer.Option("--runtime", help="Engine; by default the one it was written for.")]


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """The same answers, with fewer bits: compress a trained checkpoint, prove it, serve it."""
    if version:
        typer.echo(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


@app.command(epilog="Example: `laconic compress all-MiniLM-L6-v2 --data texts.jsonl -o minilm.laconic`")
def compress(
    source: Annotated[
        str | None, typer.Argument(help="A checkpoint's folder, a weights file, or an ONNX file.", metavar="SOURCE")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder of the artifact to write.")] = None,
    data: Data = None,
    train: Annotated[Path | None, typer.Option(help="Samples to heal with; by default a part of --data.")] = None,
    recipe: Annotated[
        Path | None, typer.Option(help="YAML file, or one of `laconic recipes`; what is given here stands above it.")
    ] = None,
    task: Task = None,
    builder: Builder = None,
    target: Annotated[str | None, typer.Option(help="What to compress for: cpu.")] = None,
    to: Annotated[str | None, typer.Option(help="What to write: artifact, or checkpoint.")] = None,
    fidelity: Annotated[float | None, typer.Option(min=0, max=1, help="Mean fidelity to reach, as 0.999.")] = None,
    max_drop: Annotated[str | None, typer.Option(help="How far the metric may fall, as 1%.")] = None,
    max_latency: Annotated[str | None, typer.Option(help="Time of one sample, as 3ms.")] = None,
    max_size: Annotated[str | None, typer.Option(help="What is shipped, as 25MB.")] = None,
    budget: Annotated[str | None, typer.Option(help="Search that long for what meets the goal, as 30m.")] = None,
    engine: Annotated[str, typer.Option(help="Where a search works: local, or ray.")] = "local",
    trust: Trust = False,
    show_recipe: Annotated[bool, typer.Option("--show-recipe", help="Print what would run, and stop.")] = False,
    as_json: Json = False,
) -> None:
    """Make a checkpoint smaller and faster, and prove that its answers are the same.

    Measures how much each layer suffers in INT8, gives bits back until the goal is met, races the engines, compares the
    answers with the original's on samples that nothing has looked at, and writes an artifact with a report.
    """
    given = {"source": source, "task": task, "builder": builder, "target": target, "to": to}
    goal = {"fidelity": fidelity, "max_drop": max_drop, "max_latency": max_latency, "max_size": max_size}
    samples = {key: str(path) for key, path in (("calibrate", data), ("train", train)) if path}
    chosen = read_recipe(recipe, given | {"data": samples or None}, goal)
    seconds = None if budget is None else registry.load("laconic.units:parse_budget")(budget)
    if seconds is None and engine != "local":
        raise UsageError("--engine says where a search works, and none is asked for. Give --budget, as 30m")
    if show_recipe:
        typer.echo(chosen.to_yaml(), nl=False)
        return
    if output is None:
        raise UsageError("nowhere to write to. Give --output FOLDER, as minilm.laconic")
    if seconds is not None:
        if chosen.to == "checkpoint":
            raise UsageError("a search is for artifacts, whose speed can be measured. Leave out --budget or --to")
        solve = registry.load("compress.solve.solver:solve")
        finish(solve(chosen, output, budget=seconds, engine=engine, trust=trust), as_json)
    elif chosen.to == "checkpoint":
        finish_checkpoint(registry.load("laconic.reduce:reduce")(chosen, output, trust=trust), as_json)
    else:
        finish(registry.load("laconic.pipeline:compress")(chosen, output, trust=trust), as_json)


@app.command(epilog="Example: `laconic export all-MiniLM-L6-v2 -o minilm.laconic`")
def export(
    source: Source,
    output: Output,
    data: Data = None,
    task: Task = None,
    builder: Builder = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Only capture, engine, validation: the same model in full precision, as an artifact.

    Without --data the answers are compared on made-up inputs, and the artifact says so.
    """
    given: dict[str, Any] = {
        "source": source,
        "task": task,
        "builder": builder,
        "stages": [],
        "data": data and str(data),
    }
    chosen = read_recipe(None, given, {"fidelity": EXPORT_FIDELITY})
    finish(registry.load("laconic.pipeline:compress")(chosen, output, trust=trust), as_json)


@app.command(epilog="Example: `laconic inspect minilm.laconic`")
def inspect(artifact: ArtifactPath, runtime: RuntimeName = None, as_json: Json = False) -> None:
    """What an artifact is: signature, precision, kernels, history, sizes, speed, verdict; or what a checkpoint that was
    compressed has been through."""
    report = registry.load("laconic.inspection:report_of")(artifact)
    if report is not None:
        print_json(report) if as_json else registry.load("laconic.show:reduced")(artifact, report)
        return
    opened = registry.load("laconic.artifact:Artifact").load(artifact)
    kernels = registry.load("laconic.inspection:kernels")(opened, runtime)
    if as_json:
        print_json(registry.load("laconic.inspection:summary")(opened) | {"kernels": kernels})
        return
    registry.load("laconic.show:inspected")(opened, kernels)


@app.command(epilog="Example: `laconic verify minilm.laconic`")
def verify(artifact: ArtifactPath, runtime: RuntimeName = None, as_json: Json = False) -> None:
    """Digests, golden answers and verdict, again, on this machine.

    Exit code 3 where a check fails; each of them is listed.
    """
    checks = registry.load("laconic.inspection:verify")(artifact, runtime)
    if as_json:
        print_json([check.model_dump() for check in checks])
    else:
        registry.load("laconic.show:checked")(checks)
    failed = [check.check for check in checks if not check.passed]
    if failed:
        raise GoalMissed(f"{artifact} did not pass: {', '.join(failed)}")


@app.command(epilog="Example: `laconic bench minilm.laconic --original all-MiniLM-L6-v2`")
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
    sizes = registry.load("laconic.inspection:batch_sizes")(batches)
    timings = registry.load("laconic.inspection:bench")(
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
    registry.load("laconic.show:timed")(timings)


@app.command(epilog="Example: `laconic serve minilm.laconic --port 8000`")
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


@app.command(epilog="Example: `laconic finetune all-MiniLM-L6-v2 --task text-classification --data d.jsonl -o tuned`")
def finetune(
    source: Annotated[
        str | None, typer.Argument(help="A checkpoint's folder, or a weights file.", metavar="SOURCE")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder of the checkpoint to write.")] = None,
    data: Annotated[Path | None, typer.Option(help="Samples with labels, or pairs, or texts to continue.")] = None,
    evaluate: Annotated[Path | None, typer.Option(help="Samples to judge by; else a tenth of --data.")] = None,
    recipe: Annotated[Path | None, typer.Option(help="YAML file; what is given here stands above it.")] = None,
    task: Task = None,
    builder: Builder = None,
    epochs: Annotated[float | None, typer.Option(min=0, help="Times through the data.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Rows of a step, over all devices.")] = None,
    memory: Annotated[
        str | None, typer.Option(help="What the device may hold, as 8GiB; the fastest that fits.")
    ] = None,
    auto: Annotated[bool, typer.Option("--auto", help="After running out of memory, turn on what fits.")] = False,
    trace: Annotated[bool, typer.Option("--trace", help="Profile a few steps.")] = False,
    nvtx: Annotated[bool, typer.Option("--nvtx", help="Mark phases for Nsight.")] = False,
    memory_snapshot: Annotated[bool, typer.Option("--memory-snapshot", help="Keep every CUDA allocation.")] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write event files.")] = False,
    trust: Trust = False,
    show_recipe: Annotated[bool, typer.Option("--show-recipe", help="Print what would run, and stop.")] = False,
    as_json: Json = False,
) -> None:
    """Train a checkpoint on your data, in as little memory as it takes.

    The result is a checkpoint that `laconic compress` takes as it is. An interrupted run goes on from its last
    snapshot; under torchrun the same recipe runs on several devices.
    """
    files = {key: str(value) for key, value in {"train": data, "evaluate": evaluate}.items() if value}
    given = {
        "source": source,
        "task": task,
        "builder": builder,
        "epochs": epochs,
        "batch": batch,
        "memory": memory,
        "data": files or None,
    }
    given = {key: value for key, value in given.items() if value is not None}
    if recipe is None and not {"source", "data"} <= given.keys():
        raise UsageError("nothing to train. Give a SOURCE and --data, or a --recipe that names them")
    chosen = registry.load("laconic.training.settings:TrainingRecipe").load(recipe, **given)
    if show_recipe:
        typer.echo(chosen.to_yaml(), nl=False)
        return
    if output is None:
        raise UsageError("nowhere to write to. Give --output FOLDER, as tuned")
    watching = registry.load("laconic.training.teach:Watching")(
        trace=trace, nvtx=nvtx, memory=memory_snapshot, tensorboard=tensorboard
    )
    tuned = registry.load("laconic.training.finetune:finetune")(
        chosen, output, trust=trust, auto=auto, watching=watching
    )
    if os.environ.get("RANK", "0") != "0":
        return  # the first says it for all
    if as_json:
        print_json(registry.load("laconic.training.present:summary")(tuned))
        return
    registry.load("laconic.training.present:show")(tuned)


@app.command(epilog="Example: `laconic plan all-MiniLM-L6-v2 --batch 32 --seq 256 --memory 2GiB`")
def plan(
    source: Source,
    memory: Annotated[str, typer.Option(help="What the device holds, as 8GiB.")],
    batch: Annotated[int | None, typer.Option(min=1, help="Rows of a step; by default the recipe's.")] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="Tokens of a row; by default the model's limit.")] = None,
    recipe: Annotated[Path | None, typer.Option(help="YAML file with the settings of training.")] = None,
    task: Task = None,
    builder: Builder = None,
    device: Annotated[str | None, typer.Option(help="Plan for cpu or cuda; by default for what is here.")] = None,
    devices: Annotated[int, typer.Option(min=1, help="Devices that share the model; memory is of each.")] = 1,
    picture: Annotated[Path | None, typer.Option(help="Draw the table, as .svg or .png.")] = None,
    timeline: Annotated[Path | None, typer.Option(help="Draw the chosen one's memory over a step.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show every combination that was simulated.")] = False,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Predict the memory that training takes, technique by technique, and choose the fastest that fits.

    Nothing is allocated, and no weight is read: a folder with a config.json is enough. Exit code 3 where nothing fits.
    """
    for drawing in filter(None, (picture, timeline)):
        registry.load("laconic.planner.picture:check")(drawing)
    found = registry.load("laconic.planner.request:request")(
        Path(source),
        memory=memory,
        batch=batch,
        length=seq,
        recipe=recipe,
        task=task,
        builder=builder,
        device=device,
        devices=devices,
        trust=trust,
    )
    for path, draw in ((picture, "bars"), (timeline, "timeline")):
        if path is not None:
            registry.load(f"laconic.planner.picture:{draw}")(found, path)
    if as_json:
        print_json(registry.load("laconic.planner.present:summary")(found))
    else:
        registry.load("laconic.planner.present:show")(found, everything=everything)
    if found.chosen is None:
        raise GoalMissed("no combination of techniques fits. Take a smaller --batch or --seq, or more --memory")


@app.command()
def doctor(as_json: Json = False) -> None:
    """Which engines work here, and for each thing that does not, why."""
    findings = registry.load("laconic.doctor:examine")()
    if as_json:
        print_json([finding.model_dump(by_alias=True) for finding in findings])
        return
    registry.load("laconic.show:examined")(findings)


@app.command(epilog="Example: `laconic compress all-MiniLM-L6-v2 --recipe text-embedding --data texts.jsonl -o slim`")
def recipes(as_json: Json = False) -> None:
    """The ready recipes, for --recipe NAME."""
    found = registry.load("laconic.ready:ready")()
    if as_json:
        print_json(found)
        return
    registry.load("laconic.show:offered")(found)


@app.command(epilog="Example: `laconic compare one.laconic two.laconic --data texts.jsonl`")
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
    found = registry.load("laconic.compare:compare")(first, second, data, runtime)
    if as_json:
        print_json(found)
        return
    registry.load("laconic.show:compared")(found)


@app.command()
def schema() -> None:
    """The JSON Schema of a recipe, for editors to complete it by."""
    print_json(registry.load("laconic.schema:json_schema")())


def read_recipe(path: Path | None, given: dict[str, Any], goal: dict[str, Any]) -> Any:
    """The recipe of a file, a ready one, or the default one; what is given on the command line stands above it."""
    given = {key: value for key, value in given.items() if value is not None}
    asked = {key: value for key, value in goal.items() if value is not None}
    given |= {"goal": asked} if asked else {}
    if path is None and "source" not in given:
        raise UsageError("nothing to compress. Give a SOURCE, or a --recipe that names one")
    kind = registry.load("laconic.recipe:Recipe")
    if path is None:
        return kind.parse(given, where="command line")
    return kind.load(registry.load("laconic.ready:find")(path), **given)


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


def finish_checkpoint(result: Any, as_json: bool) -> None:
    """Show a checkpoint that was written; raise GoalMissed for what it misses."""
    if as_json:
        print_json(result.report | {"path": str(result.path), "missed": list(result.missed)})
    else:
        registry.load("laconic.show:reduced")(result.path, result.report)
    if result.missed:
        raise GoalMissed(f"the goal was missed: {'; '.join(result.missed)}. The checkpoint is in {result.path}")


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
        code = app(standalone_mode=False) or 0
    except LaconicError as error:
        fail(str(error), error.exit_code)
    except typer.TyperException as error:
        fail(error.format_message(), 2)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered goes nowhere
        sys.exit(1)
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        fail(f"{error.strerror or error}{where}{ROOM_HINT if error.errno in FULL else ''}", 1)
    if code == INTERRUPTED:
        fail("interrupted. Nothing half-written was left; what was finished is not done again", INTERRUPTED)
    sys.exit(code)


def fail(message: str, code: int) -> NoReturn:
    """One sentence on the error stream, and the exit code."""
    typer.echo(f"laconic: {message}", err=True)
    sys.exit(code)
