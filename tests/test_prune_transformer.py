"""Heads, feed-forward units and blocks removed from transformers: the proof, the replay, the capture, what is
refused."""

import copy
from functools import partial

import contexts
import models
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.prune.layers import Layers
from compress.prune.unit_pruning import Ffn, Heads
from compress.transformer.blockwise import BlockwisePass
from compress.transformer.proof import mask_units, prove, relative_difference, skip_blocks
from compress.transformer.surgery import BLOCKS, keep_blocks, keep_units, update_config
from export.capture.capture import capture
from laconic.errors import PruningError, RecipeError, SourceError, UsageError
from laconic.models.anatomy import anatomy
from laconic.models.checkpoint import Checkpoint
from laconic.models.signature import call, probe_module
from laconic.models.source_loading import load_source
from laconic.models.weights import fingerprint
from laconic.tasks.tensors import Tensors

SAVE = {
    "BERT": models.save_embedder,
    "RoBERTa": models.save_roberta,
    "DistilBERT": models.save_distilbert,
    "ViT": models.save_vit,
    "GPT-2": models.save_gpt2,
    "Llama": models.save_llama,
}
CAPTURED = ("Llama",)
"""Capturing takes seconds: the family whose graph repeats keys and values for as many heads as are left."""
STAGES = {
    "heads": Heads(keep=0.5),
    "heads, by score": Heads(keep=0.5, criterion="activation", compensate=False),
    "ffn": Ffn(keep=0.5),
    "ffn, in steps": Ffn(keep=0.25, round_to=8, steps=2),
    "ffn, by sensitivity": Ffn(keep=0.5, round_to=8, allocate="sensitivity"),
    "layers": Layers(keep=0.5),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: save(tmp_path_factory.mktemp("models") / "model") for name, save in SAVE.items()}


def build(family, layers, heads, width, ffn, groups, attention):
    """A random model, and inputs for it."""
    hidden = heads * width
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": ffn}
    text = {"vocab_size": 40, "max_position_embeddings": 32, **sizes}
    if family == "BERT":
        model = transformers.BertModel(transformers.BertConfig(**text))
    elif family == "RoBERTa":
        model = transformers.RobertaModel(transformers.RobertaConfig(**text))
    elif family == "DistilBERT":
        config = {"dim": hidden, "n_layers": layers, "n_heads": heads, "hidden_dim": ffn}
        model = transformers.DistilBertModel(transformers.DistilBertConfig(vocab_size=40, **config))
    elif family == "ViT":
        model = transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=8, patch_size=4))
    elif family == "GPT-2":
        config = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_inner": ffn, "n_positions": 32}
        model = transformers.GPT2Model(transformers.GPT2Config(vocab_size=40, **config))
    else:
        keys = {"num_key_value_heads": heads, "num_attention_heads": heads * groups, "head_dim": width}
        keys["hidden_size"] = hidden * groups
        model = transformers.LlamaModel(transformers.LlamaConfig(**{**text, **keys}))
    model.set_attn_implementation(attention)
    model.config.use_cache = False
    models.randomize(model)
    if family == "ViT":
        return model, {"pixel_values": torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))}
    ids = torch.arange(3, 24).view(3, 7)
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    return model, {"input_ids": ids, "attention_mask": mask}


shapes = st.fixed_dictionaries(
    {
        "layers": st.integers(1, 3),
        "heads": st.integers(2, 5),
        "width": st.sampled_from([4, 6, 8]),
        "ffn": st.integers(2, 40),
        "groups": st.integers(1, 3),
        "attention": st.sampled_from(["eager", "sdpa"]),
    }
)


def some_of(data, count):
    """A few of so many, in their order, at least one."""
    return data.draw(st.lists(st.integers(0, count - 1), min_size=1, unique=True).map(sorted))


@pytest.mark.parametrize("family", SAVE)
@settings(max_examples=6, derandomize=True)
@given(shape=shapes, data=st.data())
def test_a_smaller_model_is_the_larger_one_without_what_was_cut(family, shape, data):
    larger, inputs = build(family, **shape)
    for kind in ("heads", "ffn"):
        smaller, kept = copy.deepcopy(larger), {}
        for site in anatomy(larger).of(kind):
            kept[site.consumer] = (site, some_of(data, site.units))
            keep_units(smaller, *kept[site.consumer])
        update_config(smaller)
        assert apart(larger, mask_units(larger, kept), smaller, inputs) <= 1e-5
        left = [site.units * site.width for site in anatomy(smaller).of(kind)]
        assert left == [len(units) * site.width for site, units in kept.values()]
    stays = some_of(data, shape["layers"])
    shallower, found = copy.deepcopy(larger), anatomy(larger)
    keep_blocks(shallower, stays)
    gone = [found.block(index) for index in range(shape["layers"]) if index not in stays]
    assert apart(larger, skip_blocks(larger, gone), shallower, inputs) <= 1e-5
    assert len(anatomy(shallower).sites) == shallower.config.num_hidden_layers == len(stays)


def test_attention_sinks_are_cut_with_their_heads():
    config = transformers.GptOssConfig(
        **(models.TEXT | {"num_attention_heads": 4}),
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        pad_token_id=0,
    )
    larger = models.randomize(transformers.GptOssModel(config))
    smaller, kept = copy.deepcopy(larger), {}
    for site in anatomy(larger).of("heads"):
        kept[site.consumer] = (site, [1])
        keep_units(smaller, *kept[site.consumer])
    update_config(smaller)
    assert [block.self_attn.sinks.shape for block in smaller.layers] == [(2,), (2,)]
    ids = torch.arange(3, 24).view(3, 7)
    assert apart(larger, mask_units(larger, kept), smaller, {"input_ids": ids}) <= 1e-5


def apart(larger, silence, smaller, inputs):
    """The largest difference of what two models make of the same inputs, the larger one partly silent."""
    with torch.no_grad():
        with silence:
            expected = larger(**inputs).last_hidden_state
        return relative_difference(expected, smaller(**inputs).last_hidden_state)


@pytest.mark.parametrize("family", SAVE)
def test_a_passage_sees_block_by_block_what_the_model_sees(family):
    model, inputs = build(family, layers=3, heads=2, width=4, ffn=8, groups=1, attention="sdpa")
    found, seen = anatomy(model), []
    consumers = [model.get_submodule(site.consumer) for site in found.of("ffn")]
    handles = [each.register_forward_pre_hook(lambda _, args: seen.append(args[0])) for each in consumers]
    with torch.no_grad():
        call(model, inputs)
        for handle in handles:
            handle.remove()
        passage = BlockwisePass(model, found, [inputs], changes=False)
        for site, expected in zip(found.of("ffn"), seen, strict=True):
            (view,) = passage.observe(site)
            mask = inputs.get("attention_mask", torch.ones(expected.shape[:-1]))
            assert torch.equal(view.x, expected[mask.bool()])
            passage.advance(site.block)


@pytest.mark.sweep("*-RoBERTa", "*-DistilBERT")
@pytest.mark.parametrize("family", SAVE)
@pytest.mark.parametrize("method", STAGES)
def test_what_was_cut_is_saved_and_loaded_bit_for_bit(family, method, folders, tmp_path):
    checkpoint = load_source(folders[family])
    context = contexts.torch_context(checkpoint, tmp_path)
    before = fingerprint(checkpoint.module)
    smaller = STAGES[method].apply(checkpoint, context)
    assert smaller.history[-1].figures["proof"] <= 1e-5
    assert fingerprint(checkpoint.module) == before, "the original is as it was"
    smaller.save(tmp_path / "saved")
    loaded = Checkpoint.load(tmp_path / "saved")
    batch = {name: torch.tensor(array) for name, array in checkpoint.task.encode(checkpoint.task.examples(3)).items()}
    with torch.no_grad():
        expected, found = call(smaller.module, batch), call(loaded.module, batch)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.sweep("Llama")
@pytest.mark.parametrize("family", SAVE)
def test_one_cut_follows_another_and_the_result_is_captured(family, folders, tmp_path):
    checkpoint = load_source(folders[family])
    context = contexts.torch_context(checkpoint, tmp_path)
    for stage in (Ffn(keep=0.5), Layers(drop=(1,)), Heads(keep=0.5), Ffn(keep=0.5, round_to=8)):
        checkpoint = stage.apply(checkpoint, context)
    assert [record.stage for record in checkpoint.history] == ["prune.ffn", "prune.layers", "prune.heads", "prune.ffn"]
    sites = anatomy(checkpoint.module).sites
    assert len(sites) == 1
    assert sites[0]["heads"].units == 2, "of Llama two query heads, which share the one key-value head that is left"
    assert sites[0]["ffn"].units == (32 if family == "GPT-2" else 16)
    checkpoint.save(tmp_path / "saved")
    assert Checkpoint.load(tmp_path / "saved").key == checkpoint.key
    if family in CAPTURED:
        capture(checkpoint, tmp_path / "graph")


def test_the_config_says_what_all_blocks_agree_on(folders, tmp_path):
    checkpoint = load_source(folders["Llama"])
    context = contexts.torch_context(checkpoint, tmp_path)
    for stage in (Heads(keep=0.5), Ffn(keep=0.5), Layers(keep=0.5)):
        checkpoint = stage.apply(checkpoint, context)
    config = checkpoint.module.get_submodule("model").config
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (2, 1, 8)
    assert (config.intermediate_size, config.num_hidden_layers) == (32, 1)
    fresh = transformers.LlamaForCausalLM(config)
    fresh.load_state_dict(checkpoint.module.get_submodule("model").state_dict())


def test_the_same_cut_twice_gives_the_same_key(folders, tmp_path):
    checkpoint = load_source(folders["BERT"])
    first, second = (
        Ffn(keep=0.5, allocate="sensitivity", round_to=8).apply(
            checkpoint, contexts.torch_context(checkpoint, tmp_path / name)
        )
        for name in "ab"
    )
    assert first.key == second.key


def test_a_share_of_one_keeps_every_unit(folders, tmp_path):
    checkpoint = load_source(folders["BERT"])
    context = contexts.torch_context(checkpoint, tmp_path)
    kept = Ffn(keep=1.0).apply(checkpoint, context)
    assert [site.units for site in anatomy(kept.module).of("ffn")] == [64, 64]
    assert float(context.fidelity(kept).mean()) > 1 - 1e-6


def test_what_is_left_stands_in_for_what_was_cut(folders, tmp_path):
    checkpoint = load_source(folders["Llama"])
    context = contexts.torch_context(checkpoint, tmp_path)
    plain, fitted = (
        Ffn(keep=0.5, criterion="activation", compensate=compensate).apply(checkpoint, context)
        for compensate in (False, True)
    )
    assert context.fidelity(fitted).mean() > context.fidelity(plain).mean()


def test_neighbouring_blocks_that_turn_the_hidden_states_least_go(tmp_path):
    checkpoint = load_source(models.save_llama(tmp_path / "model", layers=4))
    for name, weight in checkpoint.module.named_parameters():
        weight.data *= 1e-3 if any(f"layers.{index}." in name for index in (1, 2)) and "proj" in name else 1
    cut = Layers(keep=0.5, criterion="angle").apply(checkpoint, contexts.torch_context(checkpoint, tmp_path))
    assert cut.history[-1].structure == {BLOCKS: [0, 3]}
    assert cut.history[-1].figures["proof"] < 1e-5


def test_a_last_key_value_head_keeps_its_query_heads(folders, tmp_path):
    checkpoint = load_source(folders["Llama"])
    cut = Heads(keep=0.5, steps=3).apply(checkpoint, contexts.torch_context(checkpoint, tmp_path))
    assert [(site.units, site.width) for site in anatomy(cut.module).of("heads")] == [(2, 8), (2, 8)]
    assert [cut.history[-1].figures[name] for name in ("units", "units before")] == [2, 4]


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        (Ffn(keep=0.1), "multiples of 32"),
        (Heads(keep=0.05), "drop whole blocks"),
        (Layers(keep=0.1), "leaves none"),
        (Layers(drop=(0, 1)), "one of them must stay"),
        (Layers(drop=(7,)), "numbered from 0 to 1"),
    ],
)
def test_what_makes_no_sense_is_refused(stage, words, folders, tmp_path):
    checkpoint = load_source(folders["BERT"])
    with pytest.raises((RecipeError, SourceError, UsageError), match=words):
        stage.apply(checkpoint, contexts.torch_context(checkpoint, tmp_path))


@pytest.mark.parametrize("stage", [Ffn(), Heads(), Layers()])
def test_an_architecture_that_is_not_known_is_refused(stage, tmp_path):
    module = models.randomize(models.Perceptron([8, 8, 4]))
    task = Tensors(module.inputs)
    checkpoint = Checkpoint.of(
        module, task, outputs=probe_module(module, module.inputs), source={"kind": "made"}, size=0
    )
    with pytest.raises(SourceError, match="no transformer blocks"):
        stage.apply(checkpoint, contexts.torch_context(checkpoint, tmp_path))


@pytest.mark.parametrize(
    ("name", "silent", "spoiled", "said"),
    [
        ("BERT", [0, 2], {}, "differ by"),
        ("BERT", [0, 1], {".attention.self": ("attention_head_size", 16)}, "."),
        ("GPT-2", [0, 1], {".attn": ("split_size", 32)}, "does not run"),
    ],
    ids=["another head", "scrambled heads", "a model that does not run"],
)
def test_a_cut_that_does_more_than_it_should_is_caught(name, silent, spoiled, said, folders):
    checkpoint = load_source(folders[name])
    site = anatomy(checkpoint.module).of("heads")[0]
    smaller = copy.deepcopy(checkpoint.module)
    keep_units(smaller, site, [0, 1])
    for path, (attribute, value) in spoiled.items():
        setattr(smaller.get_submodule(anatomy(smaller).block(0) + path), attribute, value)
    mask = partial(mask_units, checkpoint.module, {site.consumer: (site, silent)})
    with pytest.raises(PruningError, match=said):
        prove(checkpoint.module, mask, smaller, checkpoint.task, contexts.dataset_for(checkpoint))


def test_a_block_that_counts_its_heads_in_another_way_is_refused_by_a_sentence(tmp_path):
    config = transformers.GPTBigCodeConfig(
        vocab_size=len(models.tokenizer().get_vocab()),
        n_embd=32,
        n_layer=1,
        n_head=4,
        n_positions=32,
        bos_token_id=2,
        eos_token_id=3,
    )
    folder = models.save_transformer(tmp_path / "model", models.randomize(transformers.GPTBigCodeForCausalLM(config)))
    checkpoint = load_source(folder)
    with pytest.raises(PruningError, match="does not run"):
        Heads(keep=0.5).apply(checkpoint, contexts.torch_context(checkpoint, tmp_path))
