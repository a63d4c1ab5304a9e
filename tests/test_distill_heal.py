import copy
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from contexts import torch_context
from models import save_embedder
from torch import nn

from compress.distill import healing_monitor
from compress.distill.heal import Heal
from compress.distill.healing_monitor import BEST, LOG, HealingMonitor
from laconic.cache import Cache
from laconic.models.checkpoint import Checkpoint
from laconic.models.source_loading import load_source
from laconic.progress import Steps
from train.callbacks import run_estimate
from train.optimizers.schedule import Cosine, Linear

QUICK = {"batch_size": 8, "steps": 12, "loader": {"workers": 0}, "optimizer": {"name": "adamw", "config": {"lr": 2e-3}}}


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return load_source(save_embedder(tmp_path_factory.mktemp("mini")))


@pytest.fixture(scope="module")
def student(original):
    module = copy.deepcopy(original.module)
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        if parameter.ndim > 1:
            parameter.data += 0.3 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return Checkpoint.of(module, original.task, outputs=original.outputs, source=original.source, size=original.size)


@pytest.fixture
def context(original, tmp_path_factory, tmp_path):
    def make(name="run", **changes):
        given = torch_context(original, tmp_path / name)
        return replace(given, cache=Cache(tmp_path_factory.getbasetemp() / "cache"), **changes)

    return make


def weights(checkpoint):
    return checkpoint.module.state_dict()


def same(one, other):
    return all(torch.equal(value, weights(other)[name]) for name, value in weights(one).items())


def test_the_weights_of_the_best_look_are_what_comes_back(student, context):
    given = context()
    found = Heal(**QUICK, eval_every=3).apply(student, given)
    figures = found.history[-1].figures
    assert figures["fidelity before"] == pytest.approx(given.fidelity(student).mean())
    assert figures["fidelity after"] == pytest.approx(given.fidelity(found).mean())
    assert figures["fidelity after"] > figures["fidelity before"]
    assert figures["steps"] == 12
    looks = json.loads((given.work / LOG).read_text())["evaluations"]
    assert sorted(map(int, looks)) == [0, 3, 6, 9, 12]
    assert figures["fidelity after"] == max(looks.values()) == looks[str(int(figures["best step"]))]


def test_the_time_of_a_healing_is_told_with_its_evaluations(student, context, monkeypatch):
    reports = []
    monkeypatch.setattr(run_estimate, "ENOUGH", 0.0)
    monkeypatch.setattr(Steps, "report", lambda self, title, note: reports.append((title, note)))
    monkeypatch.setattr(HealingMonitor, "estimate_seconds", lambda self, left: 2.0 * (left // 3))
    Heal(**QUICK, eval_every=3).apply(student, context())
    ((title, note),) = reports
    assert title == "estimated time"
    assert "8 steps of" in note
    assert "4 s of evaluations" in note


def test_the_same_recipe_heals_to_the_same_bytes(student, context):
    first, second = (Heal(**QUICK).apply(student, context(name)) for name in ("one", "two"))
    assert first.key == second.key
    assert same(first, second)


def test_what_healing_made_worse_is_thrown_away_and_the_original_needs_none(student, context, original):
    settings = QUICK | {"optimizer": {"name": "sgd", "config": {"lr": 500.0}}, "max_grad_norm": None, "steps": 4}
    given = context()
    found = Heal(**settings).apply(student, given)
    figures = found.history[-1].figures
    assert figures["best step"] == 0
    assert figures["fidelity after"] == figures["fidelity before"]
    assert same(found, student)
    assert not (given.work / BEST).exists()
    found = Heal(**QUICK).apply(original, context("original"))
    assert found.history[-1].figures["steps"] == 0
    assert same(found, original)


def test_a_short_healing_is_a_gentle_one_unless_the_recipe_says_otherwise():
    rates = [Heal(steps=steps).optimizer.config["lr"] for steps in (45, 720, 2880, 10_000)]
    assert rates == pytest.approx([2.5e-5, 1e-4, 2e-4, 2e-4])
    assert Heal(steps=45, optimizer={"sgd": {"lr": 1.0}}).optimizer.config["lr"] == 1.0
    assert Heal().optimizer == Heal(steps=1000).optimizer
    assert Heal(steps=None, epochs=2).optimizer.config["lr"] == 2e-4


def test_it_ends_when_it_does_not_pay_with_the_schedule_brought_to_its_end(student, context, monkeypatch):
    rates = watched(monkeypatch)
    found = Heal(**{**QUICK, "steps": 40}, eval_every=2, patience=2, min_improvement=0.99).apply(student, context())
    assert found.history[-1].figures["steps"] == len(rates) == 26, "half, two more looks, and two steps to cool"
    assert rates[-1] < 0.1 * max(rates)


def test_minutes_are_a_limit_within_which_the_schedule_ends(student, context, monkeypatch):
    clock = iter(range(10**6))
    monkeypatch.setattr(healing_monitor, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    rates = watched(monkeypatch)
    found = Heal(**{**QUICK, "steps": 5000}, eval_every=50, minutes=0.75, patience=50).apply(student, context())
    steps = found.history[-1].figures["steps"]
    assert 20 <= steps <= 50, "45 seconds, of which a step takes one"
    assert rates[-1] < 0.1 * max(rates)


def watched(monkeypatch):
    """The learning rates after each step of what is healed from here on."""
    rates = []
    plain = healing_monitor.HealingMonitor.event

    def event(self, kit):
        inner = plain(self, kit)

        def told(done):
            ended = inner(done)
            rates.append(kit.optimizer.param_groups[0]["lr"])
            return ended

        return told

    monkeypatch.setattr(healing_monitor.HealingMonitor, "event", event)
    return rates


class Power(Exception):
    pass


def test_a_healing_that_was_killed_while_it_looked_asks_nothing_twice(student, context):
    settings = {**QUICK, "steps": 8, "snapshot_every": 2}
    made = Heal(**settings, eval_every=2, patience=9)
    whole = made.apply(student, context("whole"))
    given = context("killed")
    asked = []

    def fidelity(one):
        if len(asked) == 3:
            asked.append("cut")
            raise Power
        asked.append("look")
        return given.fidelity(one)

    with pytest.raises(Power):
        made.apply(student, replace(given, fidelity=fidelity))
    again = made.apply(student, replace(given, fidelity=fidelity))
    assert asked == ["look", "look", "look", "cut", "look", "look"], "0, 2, 4, 6 cut short, 6 again, 8"
    assert same(again, whole)
    assert again.history[-1].figures == whole.history[-1].figures


@pytest.mark.parametrize("kind", [Cosine, Linear])
def test_a_schedule_that_hurries_goes_on_from_where_it_is_and_ends_in_time(kind):
    def run(hurry):
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
        made, rates = kind(warmup=0.1).build(optimizer, 100), []
        while not made.ended:
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            made.step()
            if hurry and made.last_epoch == 50:
                made.hurry(10)
                kept = made.state_dict()
                made = kind(warmup=0.1).build(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0), 100)
                optimizer = made.optimizer
                made.load_state_dict(json.loads(json.dumps(kept)))
        return rates

    plain, quick = run(False), run(True)
    assert len(plain) == 100
    assert len(quick) == 60
    assert quick[:51] == plain[:51]
    assert quick[51:] == pytest.approx(plain[55::5], abs=1e-9)
