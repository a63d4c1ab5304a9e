import copy
import importlib
import sys
from itertools import pairwise

import pytest
import torch
from pydantic import ValidationError
from torch import distributed, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers.optimization import Adafactor as Reference

from laconic import registry
from laconic.errors import MissingPackage, UsageError
from train.memory.optimizer_in_backward import step_parameter
from train.optimizers import low_bit
from train.optimizers.codebook import Codebook
from train.optimizers.optimizer import Optimizer, parameter_groups
from train.optimizers.parameterwise import derive_seed, round_stochastically
from train.optimizers.weight_average import average_weights, find_average

RATE = {"lion": 1e-3, "sgd": 1.0, "lamb": 1e-2, "adafactor": 1e-2}

# Settings under which a table entry is tried, by a name of its own; every registered optimizer is here as it comes.
CASES = {name: (name, {}) for name in registry.OPTIMIZERS} | {
    "sgd-momentum": ("sgd", {"momentum": 0.9}),
    "adamw-foreach": ("adamw", {"implementation": "foreach"}),
    "adamw-loop": ("adamw", {"implementation": "loop"}),
    "adamw-rounded": ("adamw", {"stochastic_rounding": True}),
    "apollo-8": ("apollo", {"rank": 8, "interval": 2}),
}
ROUNDED = [case for case in CASES if case not in ("sgd", "sgd-momentum", "adamw")]
each = pytest.mark.parametrize("case", CASES)

# Bytes of state per parameter of a weight of 1024 x 1024 in FP32.
STATE = {
    "sgd": 0,
    "sgd-momentum": 4,
    "adamw": 8,
    "adamw-foreach": 8,
    "adamw-loop": 8,
    "adamw-rounded": 8,
    "adamw-8bit": 2.04,
    "adamw-4bit": 1.07,
    "adafactor": 0.0078,
    "lion": 4,
    "lamb": 8,
    "apollo": 2,
    "apollo-8": 0.0625,
}


def config(case, **settings) -> Optimizer:
    name, fixed = CASES[case]
    try:
        kind = registry.resolve("optimizer", name)
        made = kind(**{"lr": RATE.get(name, 1e-2), **fixed, **settings})
        made.build([{"params": [nn.Parameter(torch.zeros(2))]}])
    except MissingPackage as error:
        pytest.skip(str(error))
    return made


def model(dtype=torch.float32, seed=0):
    """Matrices large enough for every way of keeping state, and vectors that are not."""
    torch.manual_seed(seed)
    settings = {"dtype": dtype}
    first, last = nn.Linear(64, 96, **settings), nn.Linear(96, 64, **settings)
    return nn.Sequential(first, nn.ReLU(), nn.LayerNorm(96, **settings), last)


def train(module, optimizer, steps, first=0):
    """Losses of `steps` steps, of which each has its own data, by its number."""
    losses = []
    for number in range(first, first + steps):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(32, 64, generator=generator).to(next(module.parameters()).dtype)
        loss = (module(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def fill(module):
    """Gradients that depend on nothing but the shape."""
    for number, parameter in enumerate(module.parameters()):
        generator = torch.Generator().manual_seed(number)
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


@pytest.mark.parametrize("name", registry.OPTIMIZERS)
def test_every_optimizer_keeps_the_contract(name):
    kind = registry.resolve("optimizer", name)
    assert issubclass(kind, Optimizer)
    assert kind() == kind.model_validate_json(kind().model_dump_json()), "the defaults survive JSON"
    assert kind.__doc__
    assert kind.library is None or kind.library in registry.EXTRAS
    for wrong in ({"lr": 0.0}, {"weight_decay": -1.0}, {"learning_rate": 1.0}):
        with pytest.raises(ValidationError):
            kind(**wrong)


@each
def test_it_lowers_a_loss_with_a_rate_that_the_groups_may_set(case):
    module = model()
    groups = parameter_groups(module, 0.01)
    optimizer = config(case).build(groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
    losses = train(module, optimizer, 30)
    assert sum(losses[-5:]) < 0.75 * sum(losses[:5])


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_state_of_plain_tensors_resumes_to_the_same_bits(case, dtype):
    rounding = {"stochastic_rounding": True} if case in ROUNDED else {}
    made = config(case, **rounding)
    whole = model(dtype)
    optimizer = made.build(parameter_groups(whole, 0.01))
    train(whole, optimizer, 3)
    weights, state = copy.deepcopy(whole.state_dict()), copy.deepcopy(optimizer.state_dict())
    for values in state["state"].values():
        assert all(type(value) in (torch.Tensor, int) or value is None for value in values.values())
    train(whole, optimizer, 3, first=3)

    resumed = model(dtype, seed=1)
    resumed.load_state_dict(weights)
    torch.manual_seed(0)
    optimizer = made.build(parameter_groups(resumed, 0.01))
    optimizer.load_state_dict(state)
    train(resumed, optimizer, 3, first=3)
    assert same(whole, resumed)


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_one_parameter_at_a_time_gives_the_same_weights(case, dtype):
    rounding = {"stochastic_rounding": True} if case in ROUNDED else {}
    made = config(case, **rounding)
    if not made.per_parameter:
        pytest.skip("keeps something for a group")
    together, apart = model(dtype), model(dtype)
    torch.manual_seed(0)
    optimizer = made.build(parameter_groups(together, 0.01))
    single = made.build(parameter_groups(apart, 0.01))
    for _ in range(3):
        fill(together)
        optimizer.step()
        fill(apart)
        for index in (1, 0):
            for parameter in reversed(single.param_groups[index]["params"]):
                step_parameter(single, index, parameter)
    assert same(together, apart)


@each
def test_the_weights_of_any_optimizer_can_be_averaged(case):
    module = model()
    optimizer = average_weights(config(case).build(parameter_groups(module, 0.01)), 0.5)
    train(module, optimizer, 3)
    assert all(find_average(optimizer, parameter) is not None for parameter in module.parameters())


def round_twins(count=2, *, seed=0, steps=1, case="adamw-rounded"):
    """Which elements of equal weights with equal gradients were rounded down, [weights, elements]."""
    torch.manual_seed(seed)
    weights = [nn.Parameter(torch.ones(64, 512, dtype=torch.bfloat16)) for _ in range(count)]
    optimizer = config(case, lr=1e-3, weight_decay=0.0, stochastic_rounding=True).build([{"params": weights}])
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
    return torch.stack([weight.detach().flatten() < 1 for weight in weights]).float()


@pytest.mark.parametrize("case", ["adamw-rounded", "adamw-8bit", "lion"])
def test_each_parameter_is_rounded_by_noise_of_its_own(case):
    rounded = round_twins(4, case=case)
    shares = rounded.mean(dim=1)
    assert ((shares > 0.05) & (shares < 0.95)).all()
    between = torch.corrcoef(rounded) - torch.eye(4)
    assert between.abs().max() < 5 / rounded.shape[1] ** 0.5, "independent, within five standard deviations"


def test_noise_of_one_parameter_is_independent_from_step_to_step_and_the_same_for_a_seed():
    torch.manual_seed(0)
    weight = nn.Parameter(torch.ones(64, 512, dtype=torch.bfloat16))
    optimizer = config("adamw-rounded", lr=1e-3, weight_decay=0.0).build([{"params": [weight]}])
    rounded = []
    for _ in range(4):
        weight.data.fill_(1)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        rounded.append(weight.detach().flatten() < 1)
    rounded = torch.stack(rounded).float()
    limit = 5 / rounded.shape[1] ** 0.5
    assert (torch.corrcoef(rounded) - torch.eye(4)).abs().max() < limit
    neighbours = torch.stack([rounded[:, :-1].flatten(), rounded[:, 1:].flatten()])
    assert torch.corrcoef(neighbours)[0, 1].abs() < limit
    assert torch.equal(round_twins(seed=5, steps=3), round_twins(seed=5, steps=3))
    assert not torch.equal(round_twins(seed=5), round_twins(seed=6))


def test_each_matrix_has_directions_and_seeds_of_its_own():
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.zeros(32, 64)) for _ in range(2)]
    optimizer = config("apollo-8", lr=1.0, weight_decay=0.0).build([{"params": weights}])
    gradient = torch.randn(32, 64)
    for weight in weights:
        weight.grad = gradient.clone()
    optimizer.step()
    assert not torch.allclose(*weights)
    assert derive_seed(0, 1, 2) == 8901564848246840783
    parts = [(0,), (0, 0), (1, 0), (0, 1), (0, 0, 1), (1, 0, 0), (2**64 - 1, 0)]
    assert len({derive_seed(*each) for each in parts}) == len(parts)


@each
def test_a_parameter_without_a_gradient_is_left_alone(case):
    module = model()
    before = copy.deepcopy(module[0].weight)
    optimizer = config(case).build(parameter_groups(module, 0.01))
    for _ in range(2):
        fill(module)
        module[0].weight.grad = None
        optimizer.step()
    assert torch.equal(before, module[0].weight)
    assert not optimizer.state[module[0].weight]


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_imagined_tensors_can_be_stepped(case, dtype):
    made = config(case)
    with FakeTensorMode():
        module = model(dtype)
        optimizer = made.build(parameter_groups(module, 0.01))
        for _ in range(2):
            module(torch.randn(4, 64, dtype=dtype)).sum().backward()
            optimizer.step()
        kept = [value for state in optimizer.state.values() for value in state.values()]
        assert all(isinstance(value, FakeTensor) or not isinstance(value, torch.Tensor) for value in kept)


@each
def test_tensors_without_values_can_be_stepped(case):
    module = model().to("meta")
    optimizer = config(case, **({"stochastic_rounding": True} if case in ROUNDED else {})).build(
        [{"params": list(module.parameters())}]
    )
    for parameter in module.parameters():
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    assert all(
        value.is_meta
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.ndim
    )


@each
def test_the_state_is_as_small_as_it_is_said_to_be(case):
    made = config(case)
    with FakeTensorMode():
        weight = nn.Parameter(torch.empty(1024, 1024))
        optimizer = made.build([{"params": [weight]}])
        weight.grad = torch.empty(1024, 1024)
        optimizer.step()
        tensors = [value for value in optimizer.state[weight].values() if isinstance(value, torch.Tensor)]
    size = sum(value.untyped_storage().nbytes() for value in tensors)
    assert size / 2**20 == pytest.approx(STATE[case], rel=0.02, abs=1e-4)


@pytest.fixture
def alone():
    """A process group of one."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@each
@pytest.mark.usefixtures("alone")
def test_sharded_weights_are_stepped_as_whole_ones_or_refused(case):
    made = config(case)
    whole, sharded = model(), model()
    fully_shard(sharded)
    optimizer = made.build(parameter_groups(sharded, 0.01))
    if not made.dtensor:
        with pytest.raises(UsageError, match="needs whole weights"):
            train(sharded, optimizer, 1)
        return
    train(whole, made.build(parameter_groups(whole, 0.01)), 3)
    train(sharded, optimizer, 3)
    for ours, theirs in zip(sharded.parameters(), whole.parameters(), strict=True):
        # A matrix of 96 columns is cut into blocks when it is whole, and not where rows may be cut apart.
        exact = made.library is None
        torch.testing.assert_close(ours.full_tensor(), theirs, rtol=0, atol=0 if exact else 2 * 3 * made.lr)
        for value in optimizer.state[ours].values():
            assert not isinstance(value, torch.Tensor) or value.ndim == 0 or isinstance(value, DTensor)


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][0] in ("sgd", "adamw")])
def test_exact_ones_agree_with_torch(case):
    made = config(case)
    assert made.exact
    ours, theirs = model(), model()
    train(ours, made.build(parameter_groups(ours, 0.01)), 10)
    if CASES[case][0] == "sgd":
        reference = torch.optim.SGD(parameter_groups(theirs, 0.01), lr=made.lr, momentum=made.momentum)
    else:
        reference = torch.optim.AdamW(parameter_groups(theirs, 0.01), lr=made.lr)
    train(theirs, reference, 10)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("case", "most"), [("adamw-8bit", 0.02), ("adamw-4bit", 0.1), ("apollo", 1e-6)])
def test_an_approximation_stays_near_to_adamw(case, most):
    """APOLLO with a rank above every axis is AdamW itself, but for its larger eps."""
    made = config(case)
    ours, theirs = model(), model()
    losses = train(ours, made.build(parameter_groups(ours, 0.01)), 20)
    reference = torch.optim.AdamW(parameter_groups(theirs, 0.01), lr=made.lr, eps=made.eps)
    assert losses[-1] == pytest.approx(train(theirs, reference, 20)[-1], rel=most)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("signed", [True, False])
def test_the_codes_are_those_of_torchao(bits, signed):
    config(f"adamw-{bits}bit")
    book, ops = Codebook(bits, signed=signed), importlib.import_module("torchao.optim.quant_utils")
    values = torch.randn(256 * 400, generator=torch.Generator().manual_seed(0))
    values = torch.cat([values if signed else values.square(), torch.zeros(256)])
    codes, scale = torch.zeros(len(values) * bits // 8, dtype=torch.uint8), torch.zeros(len(values) // book.block)
    book.encode(values, codes, scale)
    scaled, largest = ops.scale_tensor(values, book.block)
    expected = getattr(ops, f"quantize_{bits}bit_with_qmap")(scaled, book.lookup(scaled.device).values)
    found = codes if bits == 8 else torch.stack([codes >> 4, codes & 15], dim=1).view(-1)
    assert torch.equal(found, expected)
    assert torch.equal(scale, largest)
    near = {8: 0.02, 4: 0.2}[bits]
    assert (book.decode(codes, scale) - values).abs().view(-1, book.block).amax(1).le(near * largest).all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("signed", [True, False])
def test_a_code_begins_half_way_from_the_one_before(bits, signed):
    config(f"adamw-{bits}bit")
    lookup = Codebook(bits, signed=signed).lookup(torch.device("cpu"))
    halves = torch.tensor([(low + high) / 2 for low, high in pairwise(lookup.values.tolist())])
    below = torch.nextafter(halves, torch.tensor(-2.0))
    assert torch.equal(lookup.codes(halves), torch.arange(1, 2**bits, dtype=torch.uint8))
    assert torch.equal(lookup.codes(below), torch.arange(2**bits - 1, dtype=torch.uint8))


def test_low_bits_are_those_of_torchao_however_they_are_cut(monkeypatch):
    monkeypatch.setattr(low_bit, "PIECE", 1 << 13)
    made = config("adamw-8bit")
    optimizers = importlib.import_module("torchao.optim")
    for kind, case in ((optimizers.AdamW8bit, "adamw-8bit"), (optimizers.AdamW4bit, "adamw-4bit")):
        torch.manual_seed(0)
        ours = nn.Parameter(torch.randn(150, 256))
        theirs = nn.Parameter(ours.detach().clone())
        one, other = config(case).build([{"params": [ours], "weight_decay": 0.01}]), kind([theirs], lr=made.lr)
        for _ in range(2):
            ours.grad = theirs.grad = torch.randn_like(ours)
            one.step()
            with torch.compiler.set_stance("force_eager"):
                other.step()
        # The order of the operations differs, so that a value between two codes may get the other one.
        assert ((ours - theirs).abs() > 1e-6).float().mean() < 1e-4


def test_adafactor_is_that_of_transformers():
    ours, theirs = model(), model()
    train(ours, config("adafactor").build(parameter_groups(ours, 0.01)), 10)
    settings = {"lr": RATE["adafactor"], "scale_parameter": False, "relative_step": False}
    train(theirs, Reference(parameter_groups(theirs, 0.01), **settings), 10)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_lion_moves_every_weight_by_the_rate_and_lamb_by_the_rate_times_its_norm():
    weight = nn.Parameter(torch.tensor([1.0, 2.0, -3.0]))
    optimizer = config("lion", lr=0.1, weight_decay=0.5).build([{"params": [weight]}])
    weight.grad = torch.tensor([5.0, -1e-3, 0.2])
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([0.95 - 0.1, 1.9 + 0.1, -2.85 - 0.1]))
    weight.grad = torch.tensor([-0.1, -1.0, -1.0])  # the first is outweighed by the momentum, the last is not
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([0.85 * 0.95 - 0.1, 2.0 * 0.95 + 0.1, -2.95 * 0.95 + 0.1]))
    weight = nn.Parameter(torch.randn(20, 30, generator=torch.Generator().manual_seed(0)))
    before = weight.detach().clone()
    optimizer = config("lamb", lr=0.01).build([{"params": [weight]}])
    weight.grad = torch.randn(20, 30, generator=torch.Generator().manual_seed(1))
    optimizer.step()
    assert (weight - before).norm().item() == pytest.approx(0.01 * before.norm().item(), rel=1e-4)


@pytest.mark.parametrize("shape", [(96, 64), (64, 96), (64, 16, 3, 2)])
def test_apollo_scales_the_gradient_by_channel_and_holds_its_growth(shape):
    weight = nn.Parameter(torch.zeros(shape))
    optimizer = config("apollo-8", lr=1.0, weight_decay=0.0).build([{"params": [weight]}])
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    rows, columns = grad.flatten(1).shape
    channels = grad.flatten(1) if rows <= columns else grad.flatten(1).T
    quiet = channels.clone()
    quiet[:, 10:] = 0
    weight.grad = (quiet if rows <= columns else quiet.T).reshape(shape)
    optimizer.step()
    first = weight.detach().clone()
    change = -first.flatten(1) if rows <= columns else -first.flatten(1).T
    factor = change[:, :10] / quiet[:, :10]
    assert (factor > 0).all()
    assert not change[:, 10:].any()
    torch.testing.assert_close(factor.std(dim=0), torch.zeros(10), atol=1e-4, rtol=0)
    weight.grad = grad
    optimizer.step()
    assert (weight - first).norm().item() == pytest.approx(1.01 * first.norm().item(), rel=1e-3)


def test_stochastic_rounding_keeps_the_mean_and_what_is_bf16_already():
    generator = torch.Generator().manual_seed(0)
    values = torch.tensor([1.0 + 2**-10, -3.0e-5, 7.0]).repeat(20_000, 1)
    rounded = round_stochastically(values, generator).float()
    assert torch.equal(rounded[:, 2], values[:, 2])
    torch.testing.assert_close(rounded.mean(dim=0), values[0], rtol=1e-4, atol=0)
    assert len(rounded[:, 0].unique()) == 2


@pytest.mark.parametrize("case", ["adamw-rounded", "adamw-8bit"])
def test_updates_below_the_last_digit_of_bf16_are_not_lost(case):
    """A weight of 1 that should fall by 1e-4 a step: to nearest, it would never move."""
    moved = {}
    for rounding in (True, False):
        made = config(case if rounding else "adamw-8bit", lr=1e-4, weight_decay=0.0, stochastic_rounding=rounding)
        weight = nn.Parameter(torch.ones(64, 256, dtype=torch.bfloat16))
        optimizer = made.build([{"params": [weight]}])
        for _ in range(20):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        moved[rounding] = 1 - weight.float().mean().item()
    assert moved[True] == pytest.approx(20e-4, rel=0.1)
    assert moved[False] == 0


def test_what_decays_is_what_has_two_axes_and_learns():
    module = model()
    module[0].weight.requires_grad_(False)
    module.append(nn.Linear(96, 64))
    module[4].weight = module[3].weight  # tied
    decaying, others = parameter_groups(module, 0.1)
    assert decaying["params"] == [module[3].weight]
    assert decaying["weight_decay"] == 0.1
    assert [id(each) for each in others["params"]] == [
        id(each) for each in (module[0].bias, module[2].weight, module[2].bias, module[3].bias, module[4].bias)
    ]
    assert others["weight_decay"] == 0.0
    assert len(parameter_groups(nn.Linear(2, 2, bias=False), 0.1)) == 1


def test_a_library_that_is_missing_comes_with_its_command(monkeypatch):
    made = config("adamw-8bit")
    monkeypatch.setitem(sys.modules, "torchao.optim.quant_utils", None)
    with pytest.raises(MissingPackage, match=r"'torchao' is required and not installed. Try: pip install 'laconic"):
        made.build([{"params": [nn.Parameter(torch.zeros(2))]}])
