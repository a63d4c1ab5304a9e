"""Adapters learn, what is frozen stays as it was, and the merged module answers as the trained one."""

import copy
from itertools import pairwise
from typing import ClassVar

import models
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, T5Config, T5EncoderModel

from laconic.errors import RecipeError
from laconic.models.repeated_layers import find_layers
from laconic.models.source_loading import load_source
from train.memory.lora import Lora, find_head_layers, select_targets
from train.memory.qlora import (
    BLOCK,
    CHUNK,
    NF4,
    Nf4Linear,
    Qlora,
    dequantize_nf4,
    dequantize_scales,
    quantize_nf4,
    quantize_scales,
)
from train.offload.memory_accounting import account_as
from train.planner.simulate import fakify, simulate, trace_memory
from train.step.compatibility import find_conflict
from train.step.objective import Objective
from train.step.step_parts import StepParts
from train.step.train_step import train_step
from train.step.trained_modules import trainable_parameters

SIZES = {"vocab_size": 40, "max_position_embeddings": 64}


class Labels(Objective):
    """Cross-entropy of the first output against labels, in one class per row or per token."""

    def __init__(self):
        super().__init__(None)

    def collate(self, samples, labels):
        raise NotImplementedError

    def count_terms(self, batch):
        return batch["targets"].numel()

    def loss(self, module, batch):
        logits = answers(module, batch)
        return functional.cross_entropy(logits.flatten(0, -2).float(), batch["targets"].flatten(), reduction="sum")

    def make_example(self, rows, length):
        ids = torch.arange(rows * length).view(rows, length) % SIZES["vocab_size"]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "targets": ids}


class Classes(Labels):
    def make_example(self, rows, length):
        return super().make_example(rows, length) | {"targets": torch.arange(rows) % 3}


def answers(module, batch):
    out = module(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    return out if isinstance(out, torch.Tensor) else out.logits


def gpt2(width=32, **settings):
    sizes = {"n_embd": width, "n_layer": 2, "n_head": 4, "vocab_size": 40, "n_positions": 64}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **quiet, **settings))


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    return LlamaForCausalLM(LlamaConfig(**sizes, **SIZES, use_cache=False, tie_word_embeddings=False))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return models.save_bert(tmp_path_factory.mktemp("models") / "bert", **quiet)


@pytest.fixture
def bert(folder):
    return load_source(folder).module


def make_state(module, technique, objective=None, lr=0.003):
    module.train().requires_grad_(True)
    torch.manual_seed(0)
    parts = StepParts(
        module=module,
        objective=objective or Labels(),
        make_optimizer=lambda groups: torch.optim.AdamW(groups, lr=lr),
        group_parameters=lambda module: [{"params": trainable_parameters(module)}],
    )
    technique.apply(parts)
    return parts.assemble()


def learn(state, steps=6, rows=4):
    batch = state.objective.make_example(rows, 6)
    return [float(train_step(state, batch)) for _ in range(steps)]


def snapshot(module):
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


MODELS = {"gpt2": (gpt2, Labels), "llama": (llama, Labels)}


TECHNIQUES = {"lora": (Lora(rank=4), 1e-5), "qlora": (Qlora(rank=4, base_dtype="float32"), 1e-4)}


@pytest.mark.parametrize("technique", TECHNIQUES)
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_merged_the_module_is_what_it_was_and_answers_as_it_was_trained(name, technique, bert):
    module, objective = (bert, Classes()) if name == "bert" else (MODELS[name][0](), MODELS[name][1]())
    before = snapshot(module)
    classes = [type(part) for part in module.modules()]
    technique, near = TECHNIQUES[technique]
    state = make_state(module, technique, objective)
    losses = learn(state)
    assert losses[-1] < losses[0]
    module.eval()
    batch = objective.make_example(4, 6)
    with torch.no_grad():
        expected = answers(module, batch)
        assert state.finish() is module
        torch.testing.assert_close(answers(module, batch), expected, atol=near, rtol=near)
    assert [type(part) for part in module.modules()] == classes
    after = snapshot(module)
    assert list(after) == list(before)
    changed = {key.rpartition(".")[0] for key in before if not torch.equal(before[key], after[key])}
    assert changed == set(select_targets(module, None)) | (
        {"model.classifier", "model.bert.pooler.dense"} if name == "bert" else set()
    )
    assert all(parameter.requires_grad and parameter.dtype == torch.float32 for parameter in module.parameters())
    assert not hasattr(module, "peft_config")


def test_only_adapters_and_the_head_learn_unless_the_head_is_left_out(bert):
    fresh = copy.deepcopy(bert)
    state = make_state(bert, Lora(rank=4), Classes())
    names = {name for name, parameter in bert.named_parameters() if parameter.requires_grad}
    assert {name for name in names if "lora_" not in name} == {
        f"model.{layer}.{kind}" for layer in ("bert.pooler.dense", "classifier") for kind in ("weight", "bias")
    }
    frozen = {name: value for name, value in snapshot(bert).items() if name not in names}
    learn(state, steps=1)
    assert all(torch.equal(value, frozen[name]) for name, value in bert.state_dict().items() if name in frozen)
    assert {id(parameter) for parameter in state.optimizer.state} <= {
        id(parameter) for parameter in trainable_parameters(bert)
    }
    make_state(fresh, Lora(train_head=False), Classes())
    assert all("lora_" in name for name, parameter in fresh.named_parameters() if parameter.requires_grad)


def test_projections_of_an_embedder_learn(tmp_path):
    chain = (("Pooling", {"pooling_mode_mean_tokens": True}),)
    module = load_source(models.save_embedder(tmp_path / "embedder", *chain)).module
    module.projections.append(nn.Sequential(nn.Linear(32, 8), nn.Tanh()))
    assert module.projections[0][0] in find_head_layers(module, select_targets(module, None))


@pytest.mark.parametrize("make", [gpt2, llama])
def test_an_output_layer_over_a_vocabulary_is_no_head(make):
    module = make()
    assert find_head_layers(module, select_targets(module, None)) == []


def test_a_bfloat16_base_learns_under_autocast_and_merges_in_float32(bert):
    state = make_state(bert, Lora(rank=4, base_dtype="bfloat16"), Classes())
    kinds = {parameter.requires_grad: parameter.dtype for parameter in bert.parameters()}
    assert kinds == {True: torch.float32, False: torch.bfloat16}
    losses = learn(state)
    assert losses[-1] < losses[0]
    bert.eval().float()
    batch = state.objective.make_example(4, 6)
    with torch.no_grad():
        expected = answers(bert, batch)
        torch.testing.assert_close(answers(state.finish(), batch), expected, atol=1e-5, rtol=1e-5)


def test_targets_are_the_ends_of_names_and_what_follows_them_learns():
    module = llama()
    assert select_targets(module, ("q_proj", "1.mlp.up_proj")) == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
    ]
    module = models.Perceptron([4, 8, 8, 3])
    names = select_targets(module, ("layers.0", "layers.1"))
    assert find_head_layers(module, names) == [module.layers[2]]


@pytest.mark.parametrize("kind", [Lora, Qlora])
def test_a_state_is_taken_up_again(kind):
    state = make_state(llama(), kind(rank=4))
    learn(state, steps=2)
    weights = {name: value.clone() for name, value in state.weights().items()}
    again = make_state(llama(), kind(rank=4))
    again.module.load_state_dict(weights)
    batch = state.objective.make_example(2, 6)
    with torch.no_grad(), state.forward_context():
        assert torch.equal(answers(again.module, batch), answers(state.module, batch))


@pytest.mark.parametrize("technique", [Lora(rank=4), Qlora(rank=4, base_dtype="float32")])
def test_adapters_learn_through_checkpointed_blocks(technique):
    def checkpointed(module):
        for block in find_layers(module):
            forward = block.forward
            block.forward = lambda *args, forward=forward, **kwargs: checkpoint(
                forward, *args, use_reentrant=False, **kwargs
            )
        return module

    plain = learn(make_state(gpt2(), technique))
    assert learn(make_state(checkpointed(gpt2()), technique)) == pytest.approx(plain, abs=1e-6)


@pytest.mark.parametrize(
    ("module", "targets", "said"),
    [
        (models.ResidualNet(), None, "ResidualNet has none. Name linear layers in targets \\(head\\)"),
        (models.BiLstm().lstm, None, "there are none"),
        (models.Perceptron([4, 8, 3]), ("layer.0",), "no linear layer 'layer.0'"),
        (models.Tied(), ("head",), "weights of head are those of another layer too"),
    ],
)
def test_a_model_without_layers_to_adapt_is_refused(module, targets, said):
    with pytest.raises(RecipeError, match=said):
        Lora(targets=targets).apply(StepParts(module, Labels(), torch.optim.SGD, lambda module: []))


def test_what_it_cannot_be_combined_with_is_said():
    class Other(Lora):
        slot = "precision"
        excludes: ClassVar = {}

    for name in Lora.excludes:
        assert f"lora and {name} cannot be combined" in find_conflict({"lora": Lora(), name: Other()}, None)


def peaks(technique, width=64):
    def prepare(fake):
        # On a CPU the weights that are not cast stay where they are, which is then the device.
        with account_as("host" if fake else "device"):
            module = gpt2(width)
            module = fakify(module) if fake else module
        state = make_state(module, technique)
        return state, state.objective.make_example(4, 32)

    return simulate(lambda: prepare(True)).peak(), trace_memory(lambda: prepare(False), torch.device("cpu")).peak()


SIMULATED = [
    Lora(rank=4),
    Lora(rank=4, base_dtype="bfloat16"),
    Qlora(rank=4),
    Qlora(rank=4, base_dtype="float32", double_quantization=False),
]


@pytest.mark.sweep("technique[123]")
@pytest.mark.parametrize("technique", SIMULATED)
def test_the_simulated_peak_is_the_real_one(technique):
    simulated, real = peaks(technique)
    assert simulated == pytest.approx(real, rel=0.02)


# Four bits


def pairs():
    values = torch.tensor(NF4)
    return torch.cartesian_prod(values, values)


@pytest.mark.parametrize("shape", [(64, 64), (7, 13), (3, CHUNK // 2)])
def test_each_weight_becomes_the_nearest_of_sixteen(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    codes, scales = quantize_nf4(weight, torch.tensor(NF4))
    decoded = dequantize_nf4(codes, scales, pairs(), weight.shape, torch.float32)
    blocks = functional.pad(weight.flatten(), (0, -weight.numel() % BLOCK)).view(-1, BLOCK)
    assert torch.equal(scales, blocks.abs().amax(1))
    widest = max(b - a for a, b in pairwise(NF4)) / 2
    error = functional.pad((decoded - weight).abs().flatten(), (0, -weight.numel() % BLOCK)).view(-1, BLOCK)
    assert bool((error <= scales[:, None] * widest * 1.0001).all())
    assert torch.equal(quantize_nf4(decoded, torch.tensor(NF4))[0], codes)


def test_scales_of_scales_are_near():
    scales = torch.rand(1000, generator=torch.Generator().manual_seed(0)) + 1
    small, units, mean = quantize_scales(scales)
    assert small.dtype == torch.int8
    torch.testing.assert_close(dequantize_scales(small, units, mean), scales, atol=0.5 / 127, rtol=0)


@pytest.mark.parametrize(("double", "bits"), [(True, 4.13), (False, 4.5)])
def test_frozen_weights_take_about_four_bits(double, bits):
    module = gpt2(128)
    weights = sum(module.get_submodule(name).weight.numel() for name in select_targets(module, None))
    make_state(module, Qlora(double_quantization=double))
    layers = [part for part in module.modules() if isinstance(part, Nf4Linear)]
    size = sum(value.nbytes for part in layers for name, value in part.state_dict().items() if name != "bias")
    assert size * 8 / weights == pytest.approx(bits, abs=0.01)
    assert not any(parameter.numel() == 0 for parameter in module.parameters())


def test_a_layer_of_four_bits_has_the_gradient_of_its_decoded_weights():
    module = llama()
    name = "model.layers.0.mlp.up_proj"
    make_state(module, Qlora(targets=(name,), base_dtype="float32"))
    layer = module.get_submodule(name).base_layer
    x = torch.randn(3, 32, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x).square().sum(), x)
    weight = layer.dequantize(torch.float32)
    torch.testing.assert_close(gradient, 2 * (x @ weight.T) @ weight)


def test_a_model_that_casts_to_the_dtype_of_its_weights_takes_four_bits():
    """T5 looks at the weight of the layer that ends each feed-forward block."""
    config = T5Config(vocab_size=40, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    state = make_state(T5EncoderModel(config), Qlora(rank=2, base_dtype="float32"))
    output = state.module(input_ids=torch.ones(1, 4, dtype=torch.int64)).last_hidden_state
    assert torch.isfinite(output).all()


def test_frozen_weights_of_a_cpu_stay_where_they_are(tmp_path):
    """In the file, where they were mapped from it, of which a step reads what it needs."""
    module = load_source(models.save_bert(tmp_path)).module
    before = {name: value.data_ptr() for name, value in module.named_parameters()}
    parts = StepParts(module, Labels(), None, None, torch.device("cpu"))
    Lora(train_head=False).apply(parts)
    kept = [name for name, value in module.named_parameters() if before.get(name) == value.data_ptr()]
    assert {"model.bert.embeddings.word_embeddings.weight"} <= set(kept)
