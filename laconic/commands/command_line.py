"""The commands of `laconic` as a typer application. The module of a command is imported when the command is called:
all of them would double the time of `laconic --help`."""

from importlib import import_module
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from laconic import __version__

COMMANDS = {
    "compress": (
        "compression",
        "Compress a checkpoint, and validate its outputs against the original's.",
        "laconic compress all-MiniLM-L6-v2 --data texts.jsonl -o minilm.laconic",
    ),
    "export": (
        "compression",
        "Write a model as an artifact in full precision: capture, build, validate, without compression.",
        "laconic export all-MiniLM-L6-v2 -o minilm.laconic",
    ),
    "build": (
        "compression",
        "Build the model of an artifact for another target or engine, without calibrating again.",
        "laconic build minilm.laconic --target tensorrt --original all-MiniLM-L6-v2 -o minilm-gpu.laconic",
    ),
    "inspect": (
        "artifacts",
        "Describe an artifact: signature, precision, kernels, history, size, speed, verdict.",
        "laconic inspect minilm.laconic",
    ),
    "verify": (
        "verification",
        "Check the digests, golden outputs and verdict of an artifact on this machine.",
        "laconic verify minilm.laconic",
    ),
    "sign": (
        "artifacts",
        "Sign an artifact: every file of it, in the format of OpenSSF model signing, into its model.sig.",
        "laconic sign minilm.laconic --key private.pem",
    ),
    "package": (
        "artifacts",
        "Write the build context of an image that holds artifacts at /models and serves them.",
        "laconic package minilm.laconic -o image",
    ),
    "bench": (
        "artifacts",
        "Measure latency and throughput of artifacts in one interleaved run, or of a running server (--url).",
        "laconic bench minilm.laconic --original all-MiniLM-L6-v2",
    ),
    "tune": (
        "artifacts",
        "Time an artifact's engines on this machine again, and write what is found into it.",
        "laconic tune minilm.laconic --original all-MiniLM-L6-v2",
    ),
    "serve": (
        "serving",
        "Serve artifacts over HTTP and gRPC, with dynamic batching.",
        "laconic serve minilm.laconic --port 8000",
    ),
    "size": (
        "capacity",
        "Say how many replicas of a server, and of how many cores, answer a rate of requests in time.",
        "laconic size minilm.laconic --rate 2000/s --p99 50ms",
    ),
    "finetune": (
        "training",
        "Fine-tune a checkpoint on your data, with memory-saving techniques.",
        "laconic finetune all-MiniLM-L6-v2 --task text-classification --data d.jsonl -o tuned",
    ),
    "merge": (
        "training",
        "Merge a LoRA adapter into the weights of its model, and write a checkpoint.",
        "laconic merge adapter -o merged",
    ),
    "plan": (
        "planning",
        "Predict the training memory of combinations of techniques, and choose the fastest that fits.",
        "laconic plan all-MiniLM-L6-v2 --batch 32 --seq 256 --memory 2GiB",
    ),
    "doctor": (
        "installation",
        "Check the installation: engines, packages, processor, memory and cache, with a remedy for whatever fails.",
        "laconic doctor",
    ),
    "recipes": (
        "installation",
        "List the ready recipes, for --recipe NAME.",
        "laconic compress all-MiniLM-L6-v2 --recipe text-embedding --data texts.jsonl -o slim",
    ),
    "compare": (
        "artifacts",
        "Compare two artifacts: size, speed, fidelity, precision, stages, settings.",
        "laconic compare one.laconic two.laconic --data texts.jsonl",
    ),
    "lint": (
        "artifacts",
        "Say, without a GPU, why TensorRT would refuse a graph, or what would leave INT8 or FP8.",
        "laconic lint minilm.laconic",
    ),
    "schema": (
        "installation",
        "Print the JSON Schema of a recipe, for completion in editors.",
        "laconic schema > recipe.schema.json",
    ),
}
"""The commands in the order of the help: the module of each in this package, its summary, and an example."""


class DeferredCommand(TyperCommand):
    """A command of which only the name and the summary are known before it is called."""

    def __init__(self, name: str) -> None:
        self._module, summary, self._example = COMMANDS[name]
        super().__init__(name, short_help=summary)

    def load(self) -> TyperCommand:
        """Import the command with its options."""
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")
        function = getattr(import_module(f"{__package__}.{self._module}"), str(self.name))
        single.command(self.name, epilog=f"Example: `{self._example}`")(function)
        return cast(TyperCommand, typer.main.get_command(single))

    def make_context(self, *arguments: Any, **settings: Any) -> Any:
        return self.load().make_context(*arguments, **settings)


class DeferredCommands(TyperGroup):
    """All commands, none of them imported."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "commands": {name: DeferredCommand(name) for name in COMMANDS}})


app = typer.Typer(
    name="laconic",
    cls=DeferredCommands,
    help="The same answers, with fewer bits: compress a trained checkpoint, validate the result, serve it.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """The same answers, with fewer bits: compress a trained checkpoint, validate the result, serve it."""
    if version:
        typer.echo(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)
