"""From a checkpoint to an artifact, or to a smaller checkpoint."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from laconic.commands.options import Builder, Data, Json, Output, Source, Task, Trust
from laconic.commands.output import print_json
from laconic.errors import GoalMissed, UsageError
from laconic.units import parse_budget

if TYPE_CHECKING:
    from compress.pipeline import CompressedCheckpoint
    from export.pipeline import Result
    from laconic.recipes.recipe import Recipe

EXPORT_FIDELITY = 0.9999
"""What an export in full precision must reach: FP32 of two engines differs by less than 1e-5, BF16 by 3e-5."""


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
    seconds = None if budget is None else parse_budget(budget)
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
        from compress.search.search import search

        finish(search(chosen, output, budget=seconds, engine=engine, trust=trust), as_json)
    elif chosen.to == "checkpoint":
        from compress.pipeline import compress_checkpoint

        finish_checkpoint(compress_checkpoint(chosen, output, trust=trust), as_json)
    else:
        from compress.pipeline import compress

        finish(compress(chosen, output, trust=trust), as_json)


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
    from export.pipeline import export

    chosen = read_recipe(None, given, {"fidelity": EXPORT_FIDELITY})
    finish(export(chosen, output, trust=trust), as_json)


def read_recipe(path: Path | None, given: dict[str, Any], goal: dict[str, Any]) -> "Recipe":
    """The recipe of a file, a ready one, or the default one; what is given on the command line stands above it."""
    given = {key: value for key, value in given.items() if value is not None}
    asked = {key: value for key, value in goal.items() if value is not None}
    given |= {"goal": asked} if asked else {}
    if path is None and "source" not in given:
        raise UsageError("nothing to compress. Give a SOURCE, or a --recipe that names one")
    from laconic.recipes.ready import find_recipe
    from laconic.recipes.recipe import Recipe

    if path is None:
        return Recipe.parse(given, where="command line")
    return Recipe.load(find_recipe(path), **given)


def finish(result: "Result", as_json: bool) -> None:
    """Show an artifact that was written; raise GoalMissed for what it misses."""
    from laconic.artifacts.inspection import summarize
    from laconic.commands.tables import print_compressed

    if as_json:
        print_json(summarize(result.artifact) | {"missed": list(result.missed)})
    else:
        print_compressed(result.artifact)
    if result.missed:
        raise GoalMissed(
            f"the goal was missed: {'; '.join(result.missed)}. The best result is in {result.artifact.path}. "
            f"Try a lower --fidelity, or more --data"
        )


def finish_checkpoint(result: "CompressedCheckpoint", as_json: bool) -> None:
    """Show a checkpoint that was written; raise GoalMissed for what it misses."""
    from laconic.commands.tables import print_checkpoint

    if as_json:
        print_json(result.report | {"path": str(result.path), "missed": list(result.missed)})
    else:
        print_checkpoint(result.path, result.report)
    if result.missed:
        raise GoalMissed(f"the goal was missed: {'; '.join(result.missed)}. The checkpoint is in {result.path}")
