"""Layers run one by one: the same losses as plain training, in the memory that is predicted."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from trainable_models import (
    MODELS,
    WORDS,
    assert_same,
    build,
    gpt2,
    learn,
    llama,
    make_state,
    texts,
    trace_courses,
    trained,
)

from laconic.errors import RecipeError
from train.layerwise.revolve import count_advances
from train.memory.layerwise import Layerwise
from train.memory.lora import Lora
from train.memory.mixed_precision import Bf16
from train.memory.optimizer_in_backward import OptimizerInBackward
from train.memory.qlora import Qlora
from train.planner.simulate import fakify, simulate

SETTINGS = [
    {},
    {"snapshots": 2},
    {"rows": 1, "snapshots": 1},
    {"rows": 3, "snapshots_on": "host"},
    {"snapshots": 3, "snapshots_on": "host"},
]


@pytest.mark.sweep("qwen-*")
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_losses_and_weights_are_those_of_plain_training(model, settings):
    make, batch = MODELS[model]
    assert_same(trained(make, batch(), [Layerwise(**settings)]), trained(make, batch()))


@pytest.mark.parametrize("snapshots", [None, 2])
def test_dropout_draws_the_same_numbers_as_plain_training_and_leaves_the_same_to_draw(snapshots):
    make = partial(gpt2, dropout=0.3)
    plain = trained(make, texts())
    after = torch.rand(1)
    assert_same(trained(make, texts(), [Layerwise(snapshots=snapshots)]), plain)
    assert torch.equal(torch.rand(1), after)


class ByRow(nn.Module):
    """A layer that takes its rows one after another."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states, *args, **kwargs):
        return torch.cat([self.layer(row, *args, **kwargs) for row in hidden_states.split(1)])


def test_dropout_in_parts_of_a_batch_is_the_same_when_it_is_taken_back():
    def by_row():
        model = gpt2(dropout=0.3, use_cache=False)
        model.transformer.h = nn.ModuleList([ByRow(layer) for layer in model.transformer.h])
        return model

    wanted, _ = trained(by_row, texts())
    found, _ = trained(partial(gpt2, dropout=0.3), texts(), [Layerwise(rows=1, snapshots=2)])
    assert found == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("settings", [{}, {"rows": 1, "snapshots": 2}], ids=str)
def test_autocast_is_in_force_when_a_layer_runs_again(settings):
    wanted, _ = trained(llama, texts(), [Bf16()])
    found, _ = trained(llama, texts(), [Bf16(), Layerwise(**settings)])
    assert found == pytest.approx(wanted, abs=0.01 if settings else 1e-5)


def test_micro_batches_add_up_and_an_optimizer_in_the_backward_pass_gets_each_gradient_once():
    assert_same(trained(gpt2, texts(), [Layerwise(rows=1, snapshots=2)], rows=2), trained(gpt2, texts(), rows=2))
    techniques = [Layerwise(rows=1, snapshots=2), OptimizerInBackward()]
    assert_same(trained(gpt2, texts(), techniques, clip=None), trained(gpt2, texts(), clip=None))


def test_hooks_of_a_parameter_are_called_once_a_pass_and_layers_run_as_the_schedule_says():
    state = make_state(build(gpt2), [Layerwise(rows=1)])
    calls = []
    for name, parameter in state.module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))
    learn(state, texts(), steps=1)
    assert sorted(calls) == sorted(name for name, _ in state.module.named_parameters())
    state = make_state(build(gpt2), [Layerwise(snapshots=2)])
    runs = []
    for layer in state.module.transformer.h:
        layer.register_forward_hook(lambda *_: runs.append(1))
    learn(state, texts(), steps=1)
    steps = len(state.module.transformer.h)
    # Once each on the way up, which the schedule counts but for the last, and once each to be taken back.
    assert len(runs) == count_advances(steps, 2) + 1 + steps


def frozen(learns):
    """A model of which only the parameters learn whose name contains a word."""
    model = gpt2()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(learns in name)
    return model


@pytest.mark.parametrize("learns", ["mlp.c_fc", "h.2.", "ln_f", "wpe"])
def test_what_is_frozen_stays_and_the_rest_learns_the_same(learns):
    make = partial(frozen, learns)
    assert_same(trained(make, texts(), [Layerwise(rows=1)]), trained(make, texts()))


@pytest.mark.parametrize("adapters", [Lora(), Qlora()], ids=str)
def test_adapters_learn_the_same(adapters):
    wanted, _ = trained(gpt2, texts(), [adapters])
    found, _ = trained(gpt2, texts(), [adapters, Layerwise(rows=1)])
    assert found == pytest.approx(wanted, abs=1e-3)


class Net(nn.Module):
    """Embedding, layers in a list, head; a `way` through the layers."""

    def __init__(self, way, container=nn.ModuleList, width=16):
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, width), nn.Linear(width, WORDS)
        layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(3)]
        self.layers = container(layers) if container is nn.ModuleList else container(*layers)
        self.way = way

    def forward(self, input_ids):
        return self.head(self.way(self.layers, self.table(input_ids)))


def loop(layers, hidden):
    for layer in layers:
        hidden = layer(hidden)
    return hidden


def beside(layers, hidden):
    """The sum around the layers hands its own gradient on, twice the same tensor."""
    return loop(layers, hidden) + hidden


@pytest.mark.parametrize("rows", [None, 1])
def test_a_gradient_that_others_read_too_is_not_written_over(rows):
    make = partial(Net, beside)
    assert_same(trained(make, texts(), [Layerwise(rows=rows)]), trained(make, texts()))


def test_a_sequence_and_a_slice_of_a_list_are_run_too():
    for make in (
        partial(Net, lambda layers, hidden: layers(hidden), nn.Sequential),
        partial(Net, lambda layers, hidden: loop(layers[:2], hidden)),
    ):
        assert_same(trained(make, texts(), [Layerwise(rows=1)]), trained(make, texts()))


def test_layers_keep_their_names_while_stacked_and_run_as_they_are_without_gradients():
    model = build(gpt2)
    names, cache = list(model.state_dict()), model.config.use_cache
    state = make_state(model, [Layerwise()])
    assert list(model.state_dict()) == names
    assert [*model.transformer.h] == list(model.transformer.h.children())
    learn(state, texts(), steps=1)
    state.finish()
    assert type(model.transformer.h) is nn.ModuleList
    assert not hasattr(model.transformer.h, "stack_state")
    assert model.config.use_cache is cache
    model = build(gpt2)
    state = make_state(model, [Layerwise(rows=1)])
    with torch.no_grad(), state.forward_context():
        inside = state.loss_module(texts())
    assert torch.equal(inside, state.objective.loss(state.finish(), texts()))


@pytest.mark.parametrize(
    ("model", "settings"),
    [("gpt2", SETTINGS[2]), ("llama", SETTINGS[3])],
    ids=str,
)
def test_the_simulated_peak_is_that_of_real_tensors(model, settings):
    make, batch = MODELS[model]
    found, watched = trace_courses(make, batch(), [Layerwise(**settings)])
    assert found.peak() == pytest.approx(watched.peak(), rel=0.01)
    assert found.host.max() == pytest.approx(watched.host.max(), rel=0.01)
    assert (found.host.max() > 0) == (settings.get("snapshots_on") == "host")


@pytest.mark.sweep
def test_rows_and_snapshots_each_take_from_the_peak_of_the_backward_pass():
    batch = {name: tensor.repeat(4, 1) for name, tensor in texts().items()}

    def peak(*techniques):
        def fake():
            return make_state(fakify(build(gpt2)), techniques), {n: torch.empty_like(t) for n, t in batch.items()}

        return sum(simulate(fake).phases()["backward"].values())

    # With the optimizer in the backward pass, gradients that wait for it do not hide what layers take.
    ways = [Layerwise(), Layerwise(rows=8), Layerwise(rows=8, snapshots=2)]
    found = [peak(), *(peak(way, OptimizerInBackward()) for way in ways)]
    assert found == sorted(set(found), reverse=True)


def between(layers, hidden):
    for layer in layers:
        hidden = layer(hidden) * 2
    return hidden


def by_number(layers, hidden):
    for number in range(len(layers)):
        hidden = layers[number](hidden)
    return hidden


def cut_short(layers, hidden):
    for layer in layers:
        hidden = layer(hidden)
        if layer is not None:
            break
    return hidden


def left_out(layers, hidden):
    for number, layer in enumerate(layers):
        hidden = hidden if number == 1 else layer(hidden)
    return hidden


@pytest.mark.parametrize(
    ("way", "sentence"),
    [
        (between, "between two layers of class Sequential"),
        (by_number, "does not call each of its layers once"),
        (cut_short, "does not call each of its layers once"),
        (left_out, "does not call each of its layers once"),
        (lambda layers, hidden: loop(layers, hidden.mean()), "without hidden states"),
    ],
)
def test_a_model_that_does_something_else_with_its_layers_is_refused(way, sentence):
    state = make_state(build(partial(Net, way)), [Layerwise()])
    with pytest.raises(RecipeError, match=sentence):
        learn(state, texts(), steps=1)


class Layer(nn.Module):
    """Takes something beside the hidden states, and may give it too."""

    def __init__(self, gives=False):
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.gives = gives

    def forward(self, hidden_states, extra=None):
        hidden = self.inner(hidden_states)
        return (hidden, hidden.mean()) if self.gives else hidden


def given(extra, named=False):
    """A way through layers that take something."""

    def way(layers, hidden):
        for layer in layers:
            hidden = layer(hidden_states=hidden, extra=extra()) if named else layer(hidden, extra())
        return hidden

    return way


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        (lambda: torch.zeros(16, requires_grad=True), "through which a gradient flows"),
        (lambda: SimpleNamespace(get_seq_length=int), "use_cache=False"),
        (lambda: torch.zeros(7, 3), r"shape \[7, 3\].*Set rows: null"),
    ],
)
@pytest.mark.parametrize("named", [False, True])
def test_what_layers_may_not_be_given_is_refused_with_what_to_try(extra, sentence, named):
    net = build(partial(Net, given(extra, named)))
    net.layers = nn.ModuleList([Layer(), Layer()])
    with pytest.raises(RecipeError, match=sentence):
        learn(make_state(net, [Layerwise(rows=1)]), texts(), steps=1)


def test_layers_that_return_more_than_their_hidden_states_are_refused():
    net = build(partial(Net, lambda layers, hidden: hidden + sum(layer(hidden)[0] for layer in layers)))
    net.layers = nn.ModuleList([Layer(gives=True), Layer(gives=True)])
    with pytest.raises(RecipeError, match="returns more tensors than its hidden states"):
        learn(make_state(net, [Layerwise()]), texts(), steps=1)


def test_a_model_without_a_list_of_layers_or_with_shared_weights_or_batch_statistics_is_refused():
    with pytest.raises(RecipeError, match="no list of repeated layers"):
        make_state(nn.Linear(2, 2), [Layerwise()])
    net = Net(loop)
    net.layers[1][0].weight = net.layers[0][0].weight
    with pytest.raises(RecipeError, match="layers share weights"):
        make_state(net, [Layerwise()])
    net = Net(loop)
    net.layers = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(12)) for _ in range(2)])
    with pytest.raises(RecipeError, match="batch normalization"):
        make_state(net, [Layerwise()])


@pytest.mark.gpu
def test_on_a_gpu_losses_are_those_of_plain_training_and_dropout_is_drawn_again():
    def losses(techniques):
        state = make_state(build(partial(gpt2, dropout=0.3)).cuda(), techniques, device="cuda")
        return learn(state, {name: tensor.cuda() for name, tensor in texts().items()})

    assert losses([Layerwise(snapshots=2)]) == pytest.approx(losses([]), abs=1e-4)
