import json

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from laconic import registry
from train.optimizers.schedule import Constant, Cosine, Linear, OneCycle, Schedule

STEPS = 20
each = pytest.mark.parametrize("name", registry.SCHEDULES)


def optimizer(*rates):
    groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": rate} for rate in rates or (1.0,)]
    return torch.optim.AdamW(groups)


def rates(schedule, steps=STEPS, **settings):
    """The learning rate of each step."""
    made = optimizer()
    scheduler = schedule(**settings).build(made, steps)
    seen = []
    for _ in range(steps):
        seen.append(made.param_groups[0]["lr"])
        made.step()
        scheduler.step()
    return seen


@each
def test_every_schedule_keeps_the_contract(name):
    kind = registry.resolve("schedule", name)
    assert issubclass(kind, Schedule)
    assert kind() == kind.model_validate_json(kind().model_dump_json()), "the defaults survive JSON"
    assert kind.__doc__
    for wrong in ({"warmup": 1.0}, {"warmup": -0.1}, {"warm_up": 0.1}):
        with pytest.raises(ValidationError):
            kind(**wrong)


@each
@pytest.mark.parametrize("steps", [1, 2, 3, STEPS, 1000])
def test_the_rate_is_never_above_the_one_that_was_set_and_never_none(name, steps):
    seen = rates(registry.resolve("schedule", name), steps)
    assert all(0 < rate <= 1 for rate in seen)
    assert max(seen) > 0.5


@each
def test_it_resumes_to_the_same_rates_whatever_was_loaded_first(name):
    kind = registry.resolve("schedule", name)
    whole = optimizer(1.0, 0.3)
    scheduler = kind().build(whole, STEPS)
    for _ in range(7):
        whole.step()
        scheduler.step()
    kept = [group["lr"] for group in whole.param_groups]
    state, own = json.loads(json.dumps(scheduler.state_dict())), whole.state_dict()

    after = optimizer(1.0, 0.3)
    after.load_state_dict(own)
    resumed = kind().build(after, STEPS)
    resumed.load_state_dict(state)
    assert [group["lr"] for group in after.param_groups] == kept
    for _ in range(5):
        for one, other in ((whole, scheduler), (after, resumed)):
            one.step()
            other.step()
        assert [group["lr"] for group in whole.param_groups] == [group["lr"] for group in after.param_groups]


def test_constant_stays_and_linear_and_cosine_rise_and_fall():
    assert set(rates(Constant)) == {1.0}
    seen = rates(Linear, warmup=0.2, floor=0.1)
    assert seen[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert seen[12] == pytest.approx(0.55)
    assert seen[-1] == pytest.approx(0.1 + 0.9 / 16)
    seen = rates(Cosine, warmup=0.2, floor=0.0)
    assert seen[4] == 1.0
    assert seen[12] == pytest.approx(0.5)
    assert seen[8] == pytest.approx(0.5 + 0.5 * 0.5**0.5)


@pytest.mark.parametrize("steps", [4, STEPS, 333])
def test_onecycle_is_that_of_torch(steps):
    made = optimizer()
    scheduler = OneCycleLR(made, max_lr=1.0, total_steps=steps, cycle_momentum=False)
    theirs = []
    for _ in range(steps):
        theirs.append(made.param_groups[0]["lr"])
        made.step()
        if len(theirs) < steps:
            scheduler.step()
    assert rates(OneCycle, steps) == pytest.approx(theirs)
