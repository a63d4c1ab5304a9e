"""What may follow what: every order of stages is refused by a sentence, or keeps what each stage made."""

from itertools import combinations, permutations
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic import registry
from laconic.errors import MissingPackage, RecipeError
from laconic.recipes.recipe import HEAL, Recipe
from laconic.recipes.stage import PlanStage, Property, TorchStage
from laconic.recipes.stage_order import check_order, find_stages_to_heal


class Cut(TorchStage):
    """Prunes."""

    lossy = True
    breaks: ClassVar[frozenset[Property]] = frozenset({"ranges"})
    share: float = 0.5

    def apply(self, checkpoint, context):
        return checkpoint

    @staticmethod
    def rebuild(module, record):
        pass


class Zero(Cut):
    """Makes zeros."""

    makes: ClassVar[frozenset[Property]] = frozenset({"zeros"})


class Learn(Cut):
    """Learns ranges, and trains."""

    lossy = False
    trains = True
    breaks: ClassVar[frozenset[Property]] = frozenset()
    makes: ClassVar[frozenset[Property]] = frozenset({"ranges"})


class Heal(Cut):
    """Heals."""

    lossy = False
    trains = True
    breaks: ClassVar[frozenset[Property]] = frozenset({"zeros"})
    epochs: float = 1.0


class Round(PlanStage):
    """Quantizes."""

    def plan(self, graph, context):
        raise NotImplementedError


OWN = {"cut": Cut, "zero": Zero, "learn": Learn, HEAL: Heal, "round": Round}


@pytest.fixture
def own(monkeypatch):
    """These stages and no others."""
    monkeypatch.setattr(registry, "STAGES", {name: f"{__name__}:{kind.__name__}" for name, kind in OWN.items()})
    monkeypatch.setitem(registry.TABLES, "stage", registry.STAGES)


def steps(*stages, **given):
    return [step.name for step in Recipe.parse({"source": "m", "stages": list(stages), **given}).stages]


def refusal(call):
    """What a mistake in the order is answered with; nothing where there is none."""
    try:
        call()
    except RecipeError as error:
        return str(error)
    return ""


@given(st.lists(st.sampled_from(list(OWN)), max_size=6), st.booleans())
def test_an_order_is_accepted_if_and_only_if_each_stage_keeps_what_earlier_ones_made(names, onnx):
    stages = [OWN[name]() for name in names]
    kinds = [stage.kind for stage in stages]
    is_legal = (
        kinds == sorted(kinds, reverse=True)
        and kinds.count("plan") <= 1
        and not (onnx and "torch" in kinds)
        and not any(later.breaks & stage.makes for stage, later in combinations(stages, 2))
    )
    message = refusal(lambda: check_order(names, stages, onnx=onnx))
    assert is_legal == (not message)
    if not is_legal:
        assert message.startswith("stages[")
        assert "Remove" in message or "Move" in message or "must come before" in message


def test_a_stage_that_breaks_what_another_made_names_both_and_says_what_to_do(own):
    with pytest.raises(RecipeError) as caught:
        steps("zero", HEAL)
    assert str(caught.value) == (
        f"recipe: stages[1] ({HEAL}) would destroy what zero made: weights that are zero. "
        f"Move {HEAL} before zero, or remove one of them"
    )
    with pytest.raises(RecipeError, match="learn made: ranges"):
        steps("learn", "cut")


def test_each_lossy_stage_is_healed_unless_the_next_one_trains_or_the_recipe_says_otherwise(own, monkeypatch):
    assert steps("cut", "cut", "round") == ["cut", HEAL, "cut", HEAL, "round"]
    assert steps("cut", "learn", "round") == ["cut", "learn", "round"]
    assert steps("cut", HEAL) == ["cut", HEAL]
    assert steps("learn", "round") == ["learn", "round"]
    assert steps("zero", "round") == ["zero", "round"]
    assert steps("cut", "zero") == ["cut", HEAL, "zero"]
    assert steps("cut", heal=False) == ["cut"]
    recipe = Recipe.parse({"source": "m", "stages": ["cut"], "heal": {"epochs": 3}})
    assert recipe.make_stages()[1] == Heal(epochs=3)
    with pytest.raises(RecipeError, match=r"distill\.heal: unknown key 'epoch'"):
        steps("round", heal={"epoch": 3})
    assert find_stages_to_heal([Cut(), Learn(), Cut()], Heal()) == [2]
    monkeypatch.delitem(registry.STAGES, HEAL)
    assert steps("cut", "round") == ["cut", "round"]


def test_a_completed_recipe_reads_back_and_stays_as_it_is(own, tmp_path):
    recipe = Recipe.parse({"source": "/m", "stages": ["cut", {"cut": {"share": 0.1}}, "round"], "heal": {"epochs": 2}})
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe.to_yaml())
    assert "&" not in path.read_text()
    assert Recipe.load(path) == recipe
    assert recipe.complete() == recipe


def test_a_checkpoint_is_not_quantized(own):
    assert steps("cut", "round", to="checkpoint", heal=False) == ["cut"]
    with pytest.raises(RecipeError, match="the checkpoint would be unchanged"):
        steps("round", to="checkpoint")
    with pytest.raises(RecipeError, match="the checkpoint would be unchanged"):
        Recipe.parse({"source": "m", "to": "checkpoint"})


def registered():
    """Every registered stage whose packages are here."""
    found = {}
    for name in registry.STAGES:
        try:
            found[name] = registry.resolve("stage", name)()
        except MissingPackage:
            continue
    return found


def test_every_pair_of_registered_stages_is_legal_or_refused_by_a_sentence():
    stages = registered()
    for pair in permutations(stages, 2):
        said = refusal(lambda names=pair: Recipe.parse({"source": "m", "stages": list(names)}))
        assert not said or all(name in said for name in pair), pair


def test_blocks_are_cut_before_their_layers_are_factorized():
    Recipe.parse({"source": "m", "stages": ["prune.ffn", "factorize.low-rank", "quantize.static"]})
    for cut in ("prune.ffn", "prune.heads", "prune.layers", "distill.student", "distill.relations"):
        with pytest.raises(RecipeError, match=f"Move {cut} before factorize.low-rank"):
            Recipe.parse({"source": "m", "stages": ["factorize.low-rank", cut]})
