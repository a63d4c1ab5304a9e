"""The combinations of techniques that are worth predicting, as data."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from laconic.config import NamedSettings
from laconic.errors import MissingPackage, RecipeError
from laconic.planner.meta_model import Subject
from laconic.planner.simulate import imagined, imagining
from laconic.training.assembly import make_kit
from laconic.training.settings import Training
from laconic.training.step.legality import conflict

Choice = tuple[Any, ...]
"""Techniques as a recipe writes them."""

FREE: Choice = ("sdpa", "chunked-loss")
"""What costs neither exactness nor time, wherever the model has a place for it."""

ACTIVATIONS: tuple[Choice, ...] = ((), ({"checkpoint": {"policy": "selective"}},), ("checkpoint",))
SMALLER = "adamw-8bit"
EARLY = {"chunked-loss": {"chunk": 256}}
LATE = {"chunked-loss": {"defer": True, "chunk": 256}}
HOST = {"layerwise": {"rows": 1, "keep": "host"}}
LEAN: Sequence[Choice] = (
    ({"layerwise": {"rows": 1, "snapshots": 4}}, LATE, "in-backward"),
    ({"layerwise": {"rows": 1}}, "bf16", "in-backward"),
    (HOST, LATE, {"host-weights": {"dtype": "fp32"}}),
    (HOST, LATE, {"host-weights": {"dtype": "bf16"}}),
    ({"lora": {"base": "bfloat16"}}, "bf16"),
    ({"lora": {"base": "bfloat16"}}, "bf16", "checkpoint", "accumulate"),
    ("qlora", "bf16", "checkpoint", "accumulate", {"chunked-loss": {"chunk": 128}}),
)
"""Combinations that trade more for memory than the ladder does. What is named in them stands above FREE."""

ADAPTERS = frozenset({"lora", "qlora"})
"""What trains adapters, and not the weights themselves."""


@dataclass(frozen=True)
class Candidate:
    """training: the settings with these techniques. whole: whether all weights learn. exact: whether the losses are
    those of plain FP32 training with the optimizer that was asked for, to 1e-5."""

    training: Training
    whole: bool
    exact: bool

    @property
    def name(self) -> str:
        """As people say it."""
        parts = [spelled(named) for named in self.training.techniques]
        return " + ".join([*parts, self.training.optimizer.name])


def spelled(named: NamedSettings) -> str:
    """A technique and its settings, as in `checkpoint(policy=selective)`."""
    settings = ", ".join(f"{key}={value}" for key, value in named.config.items())
    return f"{named.name}({settings})" if settings else named.name


def candidates(subject: Subject, training: Training, device: torch.device, devices: int = 1) -> list[Candidate]:
    """Plain training, what the settings ask for, a ladder of common combinations, and lean ones; the legal ones of
    them that the model has a place for."""
    fits = applicable(subject, training)
    free = tuple(name for name in FREE if name in fits)
    found: dict[str, Candidate] = {}
    for choice, optimizer, clip in proposals(training, device, free):
        techniques = placed(choice, fits)
        if techniques is None:
            continue
        changed = training.with_techniques(techniques, optimizer=optimizer, clip=clip)
        if legal(changed, devices):
            candidate = judged(changed, training, subject)
            found.setdefault(candidate.name, candidate)
    return list(found.values())


def placed(choice: Choice, fits: set[str]) -> tuple[NamedSettings, ...] | None:
    """The techniques of a choice, None where the model has no place for one of them. Its loss is taken as it can be:
    with the head's gradient late, in pieces, or whole."""
    found = []
    for each in choice:
        wanted = NamedSettings.model_validate(each)
        instead = (wanted, NamedSettings.model_validate(EARLY)) if wanted.name == "chunked-loss" else (wanted,)
        possible = next((named for named in instead if spelled(named) in fits), None)
        if possible:
            found.append(possible)
        elif wanted.name != "chunked-loss":
            return None
    return tuple(found)


def proposals(
    training: Training, device: torch.device, free: Choice
) -> Iterator[tuple[Choice, NamedSettings, float | None]]:
    """Techniques, optimizer and clip of each combination, legal or not. free: those of FREE that have a place."""
    given, clip = training.optimizer, training.clip
    asked = tuple({named.name: named.config} for named in training.techniques)
    yield (), given, clip
    yield asked, given, clip
    low = "fp16" if device.type == "cuda" and not torch.cuda.is_bf16_supported() else "bf16"
    for precision, activations, parts in product(((), (low,)), ACTIVATIONS, ((), (cut(training),))):
        choice = (*free, *precision, *activations, *parts)
        yield choice, given, clip
        if precision and activations == ("checkpoint",) and given.name == "adamw":
            yield choice, NamedSettings(name=SMALLER, config=given.config), clip
    for precision in ((), (low,)):  # gradients are at the peak only where activations are not
        yield (*free, *precision, "checkpoint", "in-backward"), given, None
    for lean in LEAN:
        named = {NamedSettings.model_validate(each).name for each in lean}
        kept = None if "in-backward" in named else clip
        yield (*(name for name in free if name not in named), *lean), given, kept


def applicable(subject: Subject, training: Training) -> set[str]:
    """The techniques that the model has a place for, spelled, each tried alone on a model without bytes.

    Raises RecipeError or MissingPackage where there is none for one that the settings ask for.
    """
    asked = {spelled(named) for named in training.techniques}
    known = [*training.techniques, *map(NamedSettings.model_validate, ("bf16", "fp16", "in-backward", *FREE, EARLY))]
    for choice in (*ACTIVATIONS, *LEAN, (cut(training),)):
        known += map(NamedSettings.model_validate, choice)
    found = set()
    for name, named in sorted({spelled(named): named for named in known}.items()):
        try:
            technique = named.configure("technique")
            parts = training.with_techniques(()).parts()
            module = subject.copy()
            with imagining():
                kit = make_kit(imagined(module), subject.objective(), parts, torch.device("cpu"))
                if not technique.requires:
                    technique.apply(kit)
            found.add(name)
        except (RecipeError, MissingPackage):
            if name in asked:
                raise
    return found


def cut(training: Training) -> dict[str, Any]:
    """Accumulation over eight parts of a batch, as far as it has as many rows."""
    return {"accumulate": {"rows": max(1, training.batch // 8)}}


def legal(training: Training, devices: int = 1) -> bool:
    """Whether the techniques go together, and with the optimizer and the mesh."""
    way = training.mesh.way if devices > 1 else None
    techniques = {named.name: named.configure("technique") for named in training.techniques}
    return conflict(techniques, training.optimizer.configure("optimizer"), clip=training.clip, way=way) is None


def judged(training: Training, given: Training, subject: Subject) -> Candidate:
    """The candidate of these settings, beside those that were given."""
    techniques = {named.name: named.configure("technique") for named in training.techniques}
    # Running statistics see each part of a batch apart: losses were up to 0.49 apart in 20 steps on a small ResNet.
    statistics = any(getattr(part, "running_mean", None) is not None for part in subject.module.modules())
    exact = (
        all(technique.exact for technique in techniques.values())
        and training.optimizer == given.optimizer
        and training.clip == given.clip
        and not (statistics and "accumulate" in techniques)
    )
    return Candidate(training, whole=not ADAPTERS & techniques.keys(), exact=exact)
