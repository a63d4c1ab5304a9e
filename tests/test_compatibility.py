"""What each technique says of the others, over all of the registry."""

import itertools

import pytest

from laconic import registry
from laconic.config import NamedSettings
from laconic.errors import MissingPackage
from train.optimizers.adamw import AdamW
from train.step.compatibility import EXCLUSIVE_SLOTS, NEEDS, SLOTS, find_conflict
from train.step.technique import Technique
from train.step_assembly import sort_by_slot

SPECIAL = {"context", "ema", "max_grad_norm", "replicate", "shard", "zero"}
"""What a technique may exclude beside other techniques."""
NAMES = sorted(registry.TECHNIQUES)
ADAMW = AdamW(implementation="loop", stochastic_rounding=True)


def find(name: str) -> type[Technique]:
    try:
        kind: type[Technique] = registry.resolve("technique", name)
    except MissingPackage as error:
        pytest.skip(str(error))
    return kind


def given(*names: str) -> dict[str, Technique]:
    return {name: NamedSettings(name=name).configure("technique") for name in names}


@pytest.mark.parametrize("name", NAMES)
def test_a_technique_says_what_it_is(name):
    kind = find(name)
    assert issubclass(kind, Technique)
    assert kind.slot in SLOTS
    assert isinstance(kind.exact, bool)
    assert kind.__doc__


@pytest.mark.parametrize("name", NAMES)
def test_a_technique_speaks_of_none_that_does_not_exist(name):
    kind = find(name)
    assert set(kind.excludes) <= set(NAMES) | SPECIAL
    assert set(kind.requires) <= set(NAMES)
    assert set(kind.requires_of_optimizer) <= set(NEEDS)
    assert name not in {*kind.excludes, *kind.requires}
    assert not set(kind.excludes) & set(kind.requires)


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(NAMES, 2)))
def test_what_cannot_be_combined_cannot_in_either_order(one, other):
    needed = [name for kind in (one, other) for name in find(kind).requires[:1]]
    there, back = given(one, other, *needed), given(*needed, other, one)
    assert (find_conflict(there, ADAMW) is None) == (find_conflict(back, ADAMW) is None)
    excluded = other in find(one).excludes or one in find(other).excludes
    crowded = find(one).slot == find(other).slot and find(one).slot in EXCLUSIVE_SLOTS
    if excluded or crowded:
        assert "cannot be combined" in str(find_conflict(there, ADAMW))


@pytest.mark.parametrize("name", NAMES)
def test_what_a_technique_needs_is_asked_for_and_suffices(name):
    kind = find(name)
    if kind.requires:
        assert f"{name} works on top of {kind.requires[0]}" in str(find_conflict(given(name), ADAMW))
    assert find_conflict(given(name, *kind.requires[:1]), ADAMW) is None


@pytest.mark.parametrize("name", NAMES)
def test_a_clip_is_refused_with_the_reason_where_it_is_excluded(name):
    if "max_grad_norm" not in find(name).excludes:
        assert find_conflict(given(name, *find(name).requires[:1]), ADAMW, max_grad_norm=1.0) is None
        return
    assert "Set max_grad_norm: null" in str(find_conflict(given(name), ADAMW, max_grad_norm=1.0))
    assert find_conflict(given(name), ADAMW) is None


@pytest.mark.parametrize("way", ["replicate", "shard"])
@pytest.mark.parametrize("name", NAMES)
def test_the_way_over_the_ranks_is_asked_about(name, way):
    kind = find(name)
    fault = find_conflict(given(name, *kind.requires[:1]), ADAMW, parallelism=[way])
    refused = [each for each in (name, *kind.requires[:1]) if way in find(each).excludes]
    assert (fault is None) == (not refused)
    if refused:
        assert f"mesh ({way})" in str(fault)


def test_an_optimizer_that_lacks_what_is_needed_is_refused():
    whole = AdamW(implementation="foreach")
    for name in NAMES:
        for need in find(name).requires_of_optimizer:
            if not getattr(whole, NEEDS[need][0], False):
                conflict = find_conflict(given(name, *find(name).requires[:1]), whole)
                assert "Choose another optimizer" in str(conflict)


def test_techniques_are_applied_in_the_order_of_their_slots():
    names = ("optimizer-in-backward", "gradient-checkpointing", "sdpa", "bf16", "chunked-cross-entropy")
    for shuffled in itertools.permutations(names):
        assert [each.slot for each in sort_by_slot(given(*shuffled))] == [
            "attention", "loss", "precision", "activations", "optimizer"
        ]  # fmt: skip
