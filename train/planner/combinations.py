"""The combinations of memory techniques that the planner predicts: assembled from what each technique proposes."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch

from laconic import registry
from laconic.config import NamedSettings
from laconic.errors import MissingPackage, RecipeError
from train.optimizers.optimizer import Optimizer
from train.parallel.region_randomness import has_dropout
from train.planner.depth_extrapolation import copy_shallow
from train.planner.meta_model import MetaModel
from train.planner.simulate import fakify, make_fake_mode
from train.settings import Training
from train.step.compatibility import SLOTS, Slot, find_conflict
from train.step.technique import Proposal, Technique
from train.step_assembly import make_step_parts

GRID: tuple[Slot, ...] = ("precision", "activations", "batch")
"""Slots whose proposals are combined with one another; the last varies fastest."""


@dataclass(frozen=True)
class Combination:
    """Techniques and an optimizer to train with.

    training: the settings with these techniques. whole: whether all weights are trained, and not adapters alone.
    exact: whether the losses are those of plain FP32 training with the optimizer that was asked for, to 1e-5.
    redraws_dropout: whether that is so without the model's dropout alone, which draws other masks.
    """

    training: Training
    whole: bool
    exact: bool
    redraws_dropout: bool = False

    @property
    def name(self) -> str:
        """Techniques and the optimizer, as in `bf16 + checkpoint(policy=selective) + adamw`."""
        parts = [format_technique(named) for named in self.training.techniques]
        return " + ".join([*parts, self.training.optimizer.name])


@dataclass(frozen=True)
class ProposedTechniques:
    """A technique's proposal with its registered names. tier: as in Proposal. slot: of the technique that proposes."""

    tier: str
    slot: Slot
    techniques: tuple[NamedSettings, ...]

    @classmethod
    def of(cls, name: str, technique: type[Technique], proposal: Proposal) -> "ProposedTechniques":
        """Make the proposal of the technique that is registered under `name`."""
        entries = (*proposal.before, {name: dict(proposal.config)}, *proposal.after)
        return cls(proposal.tier, technique.slot, tuple(NamedSettings.model_validate(entry) for entry in entries))


def format_technique(named: NamedSettings) -> str:
    """Format a technique and its settings, as in `gradient-checkpointing(policy=selective)`."""
    settings = ", ".join(f"{key}={value}" for key, value in named.config.items())
    return f"{named.name}({settings})" if settings else named.name


def list_combinations(
    model: MetaModel, training: Training, device: torch.device, devices: int = 1
) -> list[Combination]:
    """List plain training, what the settings ask for, a grid of common combinations, and lean ones: those of them that
    are legal and that the model supports.

    Raises RecipeError or MissingPackage for a technique of the settings that the model or the machine does not support.
    """
    proposals = collect_proposals(training.batch_size, device)
    supported = find_supported(model, training, proposals)
    combinations: dict[str, Combination] = {}
    for choice, optimizer in enumerate_choices(training, proposals, supported):
        named = replace_unsupported(choice, supported)
        if named is None:
            continue
        techniques = configure(named)
        clip = (
            None
            if any("max_grad_norm" in technique.excludes for technique in techniques.values())
            else training.max_grad_norm
        )
        changed = training.with_techniques(named, optimizer=optimizer, max_grad_norm=clip)
        strategy = changed.mesh.parallelism if devices > 1 else ()
        optimizer_settings = optimizer.configure("optimizer")
        whole = not any(technique.trains_adapters for technique in techniques.values())
        if training.freeze and not whole:
            continue
        conflict = find_conflict(
            techniques, optimizer_settings, max_grad_norm=clip, parallelism=strategy, ema=training.ema
        )
        if conflict is None:
            redraws = has_dropout(model.module) and any(technique.redraws_dropout for technique in techniques.values())
            combination = Combination(changed, whole, is_exact(changed, techniques.values(), training, model), redraws)
            combinations.setdefault(combination.name, combination)
    return list(combinations.values())


def collect_proposals(batch: int, device: torch.device) -> list[ProposedTechniques]:
    """Collect what the registered techniques propose: those that train all weights before those that train adapters,
    and each after those that it requires."""
    registered: dict[str, type[Technique]] = {name: registry.resolve("technique", name) for name in registry.TECHNIQUES}
    ordered = sorted(registered.items(), key=lambda item: (item[1].trains_adapters, bool(item[1].requires)))
    return [
        ProposedTechniques.of(name, technique, proposal)
        for name, technique in ordered
        for proposal in technique.proposals(batch, device)
    ]


def enumerate_choices(
    training: Training, proposals: Sequence[ProposedTechniques], supported: set[str]
) -> Iterator[tuple[tuple[NamedSettings, ...], NamedSettings]]:
    """Yield the techniques and the optimizer of each combination, legal or not."""

    def list_in(tier: str, slot: Slot) -> list[tuple[NamedSettings, ...]]:
        return [proposal.techniques for proposal in proposals if (proposal.tier, proposal.slot) == (tier, slot)]

    optimizer, smaller = training.optimizer, find_smaller(training.optimizer)
    yield (), optimizer
    yield training.techniques, optimizer
    every_free = [named for slot in SLOTS for techniques in list_in("free", slot) for named in techniques]
    free = tuple(named for named in every_free if format_technique(named) in supported)
    grid = [[(), *list_in("grid", slot)] for slot in GRID]
    leanest = grid[GRID.index("activations")][-1]
    for precision, activations, batch in product(*grid):
        choice = (*free, *precision, *activations, *batch)
        yield choice, optimizer
        if smaller and precision and activations == leanest:
            yield choice, smaller
    # Gradients are at the peak only where activations are not.
    for precision, step in product(grid[GRID.index("precision")], list_in("grid", "optimizer")):
        yield (*free, *precision, *leanest, *step), optimizer
    for proposal in proposals:
        if proposal.tier == "lean":
            names = {named.name for named in proposal.techniques}
            yield (*(named for named in free if named.name not in names), *proposal.techniques), optimizer


def find_smaller(optimizer: NamedSettings) -> NamedSettings | None:
    """Find the optimizer's variant with less state, with the settings that both have; None without one."""
    name = optimizer.configure("optimizer", Optimizer).smaller
    if name is None:
        return None
    known = registry.resolve("optimizer", name).model_fields
    return NamedSettings(name=name, config={key: value for key, value in optimizer.config.items() if key in known})


def find_supported(model: MetaModel, training: Training, proposals: Iterable[ProposedTechniques]) -> set[str]:
    """Find the techniques with their settings, formatted, that the model supports: each is applied alone to a copy of
    the model on fake tensors.

    Raises RecipeError or MissingPackage for an unsupported one that the settings ask for.
    """
    asked = {format_technique(named) for named in training.techniques}
    tried = {format_technique(named): named for named in training.techniques}
    for named in (named for proposal in proposals for named in proposal.techniques):
        fallback = get_fallback(named)
        tried |= {format_technique(variant): variant for variant in (named, fallback) if variant}
    supported = set()
    for name, named in sorted(tried.items()):
        try:
            technique = named.configure("technique", Technique)
            parts = training.with_techniques((), freeze=()).components()
            module = copy_shallow(model.module)
            with make_fake_mode():
                state = make_step_parts(fakify(module), model.objective(), parts, torch.device("cpu"))
                if not technique.requires:
                    technique.apply(state)
            supported.add(name)
        except (RecipeError, MissingPackage):
            if name in asked:
                raise
    return supported


def replace_unsupported(choice: Iterable[NamedSettings], supported: set[str]) -> tuple[NamedSettings, ...] | None:
    """Return the techniques of a choice, with the fallback of one that the model does not support, and without an
    optional one; None where another is not supported."""
    kept = []
    for named in choice:
        variants = filter(None, (named, get_fallback(named)))
        settings = next((variant for variant in variants if format_technique(variant) in supported), None)
        if settings:
            kept.append(settings)
        elif not named.configure("technique", Technique).optional:
            return None
    return tuple(kept)


def get_fallback(named: NamedSettings) -> NamedSettings | None:
    """Return the technique with the settings that it falls back to in a model that does not support the given ones."""
    fallback = named.configure("technique", Technique).fallback
    return None if fallback is None else NamedSettings(name=named.name, config=dict(fallback))


def configure(techniques: Iterable[NamedSettings]) -> dict[str, Technique]:
    """Configure techniques, by name."""
    return {named.name: named.configure("technique", Technique) for named in techniques}


def is_exact(changed: Training, techniques: Iterable[Technique], asked: Training, model: MetaModel) -> bool:
    """Return whether the changed settings train as the given ones do without techniques, to 1e-5 of the loss."""
    techniques = list(techniques)
    # Running statistics see each micro-batch by itself: losses were up to 0.49 apart in 20 steps on a small ResNet.
    statistics = any(getattr(part, "running_mean", None) is not None for part in model.module.modules())
    return (
        all(technique.exact for technique in techniques)
        and (changed.optimizer, changed.max_grad_norm) == (asked.optimizer, asked.max_grad_norm)
        and not (statistics and any(technique.micro_batch is not None for technique in techniques))
    )
