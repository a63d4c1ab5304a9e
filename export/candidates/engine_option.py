"""Build a plan for an engine, and measure the fidelity of its outputs."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from export.candidates.reference import REFERENCE, open_reference
from export.formats.module_origin import ModuleOrigin
from export.placements.place import place
from export.placements.rules import PlacementRules, adapt_plan, keep_compressed
from export.placements.split_decoder import has_decoder, is_text_decoder, split_decoder
from laconic import registry
from laconic.artifacts.artifact import is_installed
from laconic.errors import MissingPackage, RuntimeFailure, UnsupportedPrecision
from laconic.hashing import hash_of
from laconic.progress import Steps
from laconic.quantization.graph import Graph
from laconic.quantization.plan import Plan
from laconic.recipes.recipe import Recipe
from laconic.runtimes.model_session import open_model
from laconic.runtimes.runtime import Compute, Session, make_runtime


@dataclass(frozen=True)
class EngineOption:
    """An engine, and the arithmetic of the layers that are not quantized.

    reference: whether the engine is not on this machine, so that its graphs are run node by node on the CPU instead.
    overflow: tensors that exceed FP16; the nodes around them stay in FP32. origin: of the module, for an engine that
    reads a file of its own.
    """

    runtime: str
    compute: Compute
    reference: bool = False
    overflow: frozenset[str] = frozenset()
    origin: ModuleOrigin | None = field(default=None, compare=False)

    @classmethod
    def here(cls, runtime: str, compute: Compute) -> "EngineOption":
        """Make the option as this machine can run it: by its engine if that is installed, else by reference
        execution."""
        return cls(runtime, compute, reference=not is_installed(runtime))

    @property
    def name(self) -> str:
        """The name shown to users: `openvino, bfloat16`."""
        return f"{self.runtime}, {self.compute}"

    @property
    def on_gpu(self) -> bool:
        """Whether the engine runs on a GPU."""
        return self.runtime not in registry.list_engines("cpu")

    @property
    def quantizes_attention(self) -> bool:
        """Whether the engine gains from products of attention in INT8, in this arithmetic."""
        return self._rules.attention

    @property
    def package(self) -> str:
        """The Python package that runs the graphs."""
        return REFERENCE.package if self.reference else make_runtime(self.runtime).package

    @property
    def version(self) -> str:
        """The version of that package."""
        return REFERENCE.version() if self.reference else make_runtime(self.runtime).version()

    @property
    def key(self) -> str:
        """Digest of the engine, its version and its arithmetic."""
        return hash_of(self.name, self.reference, sorted(self.overflow), self.package, self.version)

    def adapt(self, graph: Graph, plan: Plan) -> Plan:
        """Return the plan with the precisions that this engine has kernels for. Raises UnsupportedPrecision for FP8
        where it has none."""
        return adapt_plan(graph, plan, self._rules, self.compute, self._exceeding)

    def build(self, graph: Graph, plan: Plan, path: Path) -> None:
        """Write the graph with the plan's Q/DQ nodes, placed by this engine's rules, to `path`; the encoder of an
        encoder-decoder beside it, or a file of the engine's own. Raises RuntimeFailure for a model that writes texts on
        a GPU, and what writing that file raises."""
        if has_decoder(graph) and self.on_gpu:
            raise RuntimeFailure(
                f"{self.runtime} does not run models that write texts yet. Choose --target cpu, whose engines "
                f"{' and '.join(registry.TARGETS['cpu'])} do"
            )
        rules = keep_compressed(self._rules) if is_text_decoder(graph) else self._rules
        adapted = self.adapt(graph, plan)
        place(graph, adapted, rules, path, self.compute, self._exceeding)
        if has_decoder(graph):
            split_decoder(path)
        if self.runtime in registry.ENGINE_FILES:
            write = registry.resolve("engine file", self.runtime)
            write(path, adapted, self.origin if is_text_decoder(graph) else None)

    def open(self, path: Path, threads: int) -> Session:
        """Load a graph that `build` wrote for this engine."""
        if self.reference:
            return self.open_reference(path, threads)
        engine = make_runtime(self.runtime)
        return open_model(path, partial(engine.open, threads=threads, compute=self.compute))

    def open_for_trial(self, path: Path, threads: int) -> Session:
        """Load a graph that `build` wrote for this engine, to measure fidelity alone."""
        if self.reference:
            return self.open_reference(path, threads)
        engine = make_runtime(self.runtime)
        return open_model(path, partial(engine.open_for_trial, threads=threads, compute=self.compute))

    def open_reference(self, path: Path, threads: int) -> Session:
        """Load a graph that `build` wrote for this engine, to be run node by node on the CPU."""
        if self.on_gpu:
            return open_reference(path, threads)
        return open_model(path, partial(REFERENCE.open, threads=threads, optimize=False))

    @property
    def _exceeding(self) -> frozenset[str]:
        return self.overflow if self.compute == "float16" else frozenset()

    @property
    def _rules(self) -> PlacementRules:
        rules: PlacementRules = registry.resolve("placement", self.runtime)[self.compute]
        return rules


SENSITIVITY_OPTION = EngineOption("onnxruntime", "float32")
"""The option that layer sensitivity is measured with: sensitivity depends on the quantization grid and not on the
engine, and this one loads a graph fastest."""


def list_options(engines: tuple[str, ...], target: str) -> list[EngineOption]:
    """List every engine and arithmetic that runs on this machine, the preferred first.

    If none does and the target is a GPU, list the first engine's arithmetics, by reference execution. Raises
    MissingPackage if no engine of a CPU is installed.
    """
    options: list[EngineOption] = []
    absent: list[str] = []
    for name in engines:
        try:
            options += [EngineOption(name, compute) for compute in make_runtime(name).computes()]
        except MissingPackage as error:
            absent.append(str(error))
    if not options and target != "cpu":
        return [
            EngineOption(engines[0], compute, reference=True) for compute in registry.resolve("placement", engines[0])
        ]
    if not options:
        raise MissingPackage(" ".join(absent))
    return options


def list_recipe_options(recipe: Recipe, graph: Graph, origin: ModuleOrigin, steps: Steps) -> list[EngineOption]:
    """List the engine options that a recipe is for, the preferred first: where it names the engine, the first of its
    arithmetics, behind INT8 activations if it asks for them, so that nothing is left for a race to choose.
    origin: of the module."""
    options = [replace(each, origin=origin) for each in list_options(recipe.engines, recipe.target)]
    if recipe.engine_only:
        options = [replace(options[0], compute=next(iter(registry.resolve("placement", recipe.engine_only))))]
    engines = dict.fromkeys(option.runtime for option in options if not option.reference and is_text_decoder(graph))
    names = [name for name in engines if make_runtime(name).has_int8_dynamic()]
    dynamic = [EngineOption(name, "int8-dynamic", origin=origin) for name in names]
    if recipe.int8_activations and not dynamic:
        steps.warn(
            f"int8_activations changes nothing here: it takes a language model, OpenVINO, and a processor with VNNI. "
            f"Arithmetic stays in {options[0].compute}"
        )
    if options[0].reference:
        steps.warn(
            f"{options[0].runtime} is not on this machine: its graphs are run node by node on the CPU, and not timed. "
            f"Run `laconic tune` on the artifact where it is"
        )
    return list(dict.fromkeys([*dynamic, *options])) if recipe.int8_activations else options


def check_supported(graph: Graph, plan: Plan, options: Sequence[EngineOption]) -> None:
    """Raise UnsupportedPrecision if none of these options has kernels for a plan."""
    errors = []
    for option in options:
        try:
            option.adapt(graph, plan)
            return
        except UnsupportedPrecision as error:
            errors.append(error)
    raise errors[0]
