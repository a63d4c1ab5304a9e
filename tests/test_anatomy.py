"""Where blocks, heads and feed-forward units are found, and what is said where there are none."""

import copy

import models
import pytest
import torch
import transformers
from torch import nn

from compress.prune.channel_groups import find_channel_groups
from compress.transformer.blockwise import BlockwisePass, find_residual
from compress.transformer.proof import mask_units, relative_difference
from compress.transformer.surgery import keep_blocks, keep_units, read_sizes, update_config
from laconic.errors import SourceError, UsageError
from laconic.models.anatomy import Site, anatomy, iterate_configs
from laconic.models.source_loading import load_source

FOLDERS = {
    "BERT, embedder": models.save_embedder,
    "BERT, classifier": models.save_bert,
    "RoBERTa": models.save_roberta,
    "DistilBERT": models.save_distilbert,
    "ViT": models.save_vit,
    "GPT-2": models.save_gpt2,
    "Llama": models.save_llama,
}

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
TEXT = SIZES | {"vocab_size": 40, "max_position_embeddings": 32}
IMAGE = SIZES | {"image_size": 16, "patch_size": 4}
TOKENS = {"input_ids": torch.arange(3, 24).view(3, 7), "attention_mask": torch.ones(3, 7, dtype=torch.int64)}
TOKENS["attention_mask"][1, 4:] = 0
BERT = anatomy(transformers.BertModel(transformers.BertConfig(**models.TEXT))).shape
NAMED = {
    "ALBERT": lambda: transformers.AlbertModel(transformers.AlbertConfig(embedding_size=16, **TEXT)),
    "DeBERTa-v2": lambda: transformers.DebertaV2Model(
        transformers.DebertaV2Config(
            **TEXT, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8, share_att_key=True
        )
    ),
    "ModernBERT": lambda: transformers.ModernBertModel(
        transformers.ModernBertConfig(
            **TEXT, pad_token_id=0, cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2
        )
    ),
    "BEiT": lambda: transformers.BeitModel(transformers.BeitConfig(**IMAGE, use_relative_position_bias=True)),
    "DINOv2": lambda: transformers.Dinov2Model(
        transformers.Dinov2Config(**{name: size for name, size in IMAGE.items() if name != "intermediate_size"})
    ),
    "OPT": lambda: transformers.OPTModel(
        transformers.OPTConfig(
            vocab_size=40,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            ffn_dim=48,
            max_position_embeddings=32,
            word_embed_proj_dim=32,
        )
    ),
    "GPT-NeoX": lambda: transformers.GPTNeoXModel(transformers.GPTNeoXConfig(**TEXT)),
    "Phi": lambda: transformers.PhiModel(transformers.PhiConfig(**TEXT)),
    "Gemma": lambda: transformers.GemmaModel(transformers.GemmaConfig(**TEXT, head_dim=8, num_key_value_heads=1)),
    "Gemma 3": lambda: transformers.Gemma3TextModel(
        transformers.Gemma3TextConfig(**TEXT, head_dim=8, num_key_value_heads=2)
    ),
    "Qwen2": lambda: transformers.Qwen2Model(transformers.Qwen2Config(**TEXT, num_key_value_heads=2)),
    "Qwen3": lambda: transformers.Qwen3Model(transformers.Qwen3Config(**TEXT, head_dim=8, num_key_value_heads=2)),
    "Mistral": lambda: transformers.MistralModel(transformers.MistralConfig(**TEXT, num_key_value_heads=2)),
    "XLM-R": lambda: transformers.XLMRobertaModel(transformers.XLMRobertaConfig(**TEXT)),
    "DeiT": lambda: transformers.DeiTModel(transformers.DeiTConfig(**IMAGE)),
    "ELECTRA": lambda: transformers.ElectraModel(transformers.ElectraConfig(embedding_size=16, **TEXT)),
    "SigLIP, text": lambda: transformers.SiglipTextModel(transformers.SiglipTextConfig(**TEXT)),
    "SigLIP, images": lambda: transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**IMAGE)),
    "CLIP, text": lambda: transformers.CLIPTextModel(transformers.CLIPTextConfig(**TEXT, eos_token_id=3)),
    "T5": lambda: transformers.T5EncoderModel(
        transformers.T5Config(vocab_size=40, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    ),
    "Swin, with two stages": lambda: transformers.SwinModel(
        transformers.SwinConfig(
            image_size=16, patch_size=2, embed_dim=16, depths=[2, 1], num_heads=[2, 4], window_size=2
        )
    ),
    "SegFormer, with convolutions in its FFN": lambda: transformers.SegformerModel(
        transformers.SegformerConfig(
            hidden_sizes=[8, 16, 16, 16], depths=[1] * 4, num_attention_heads=[2] * 4, sr_ratios=[1] * 4
        )
    ),
    "CLIP, images": lambda: transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**IMAGE)),
}
"""Models whose blocks are found by shape alone."""


def build(name):
    """A random model, and inputs for it."""
    model = models.randomize(NAMED[name]())
    model.config.use_cache = False
    images = {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))}
    return model, images if model.main_input_name == "pixel_values" else TOKENS


@pytest.mark.parametrize("kind", ["heads", "ffn"])
@pytest.mark.parametrize("name", NAMED)
def test_what_is_found_by_shape_is_cut_with_a_proof(name, kind):
    model, inputs = build(name)
    smaller, kept = copy.deepcopy(model), {}
    for site in anatomy(model).of(kind):
        kept[site.consumer] = (site, list(range(0, site.units, 2)))
        keep_units(smaller, *kept[site.consumer])
    update_config(smaller)
    with torch.no_grad():
        with mask_units(model, kept):
            expected = model(**inputs).last_hidden_state
        assert relative_difference(expected, smaller(**inputs).last_hidden_state) <= 1e-5
    count = sum(parameter.numel() for parameter in smaller.parameters())
    assert count < sum(parameter.numel() for parameter in model.parameters())
    anatomy(smaller).of(kind)


@pytest.mark.parametrize("name", NAMED)
def test_a_pass_block_by_block_finds_the_residual_stream(name):
    model, inputs = build(name)
    found = anatomy(model)
    with torch.no_grad():
        passage = BlockwisePass(model, found, [inputs], changes=False)
        for site in found.sites[0].values():
            (view,) = passage.observe(site)
            scaled = name in ("DINOv2", "Gemma 3")  # the output of each half is scaled or normalized
            windowed = name.startswith("Swin") and site.kind == "heads"  # its tokens are in another order
            assert (not view.residual.any()) == (scaled or windowed)


def test_a_pass_begins_anew_where_a_block_does_not_take_what_the_one_before_it_gave():
    model, inputs = build("Swin, with two stages")
    found = anatomy(model)
    with torch.no_grad():
        passage = BlockwisePass(model, found, [inputs], changes=False)
        for index, sites in enumerate(found.sites):
            (view,) = passage.observe(sites["ffn"])
            assert view.x.shape == ((128, 64), (128, 64), (32, 128))[index], "two images of 64, then of 16 patches"
            passage.advance(index)
    with pytest.raises(SourceError, match=r"2 lists .* prune\.ffn or prune\.heads"):
        keep_blocks(model, [0, 1])


def test_blocks_without_heads_that_can_be_cut_have_their_units_cut():
    block = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.TransformerEncoder(block, 2, enable_nested_tensor=False).eval()
    found = anatomy(model)
    assert [site.units for site in found.of("ffn")] == [64, 64]
    with pytest.raises(SourceError, match=r"no attention heads .* Leave prune\.heads out, or use prune\.ffn"):
        found.of("heads")


def test_where_one_key_value_head_serves_all_a_unit_is_a_query_head():
    model, _ = build("Gemma")
    (site, _) = anatomy(model).of("heads")
    assert (site.units, site.width, [source.width for source in site.sources]) == (4, 8, [8])
    smaller = copy.deepcopy(model)
    for site in anatomy(smaller).of("heads"):
        keep_units(smaller, site, [0, 2])
    update_config(smaller)
    assert (smaller.config.num_attention_heads, smaller.config.num_key_value_heads) == (2, 1)


HALF = {
    "MPNet": lambda: transformers.MPNetModel(transformers.MPNetConfig(**TEXT)),
    "Bloom": lambda: transformers.BloomModel(
        transformers.BloomConfig(vocab_size=40, hidden_size=32, n_layer=2, n_head=4, use_cache=False)
    ),
    "Phi-3": lambda: transformers.Phi3Model(
        transformers.Phi3Config(**TEXT, num_key_value_heads=2, pad_token_id=0, use_cache=False)
    ),
}
"""Models whose heads are counted outside of their blocks."""


@pytest.mark.parametrize("name", HALF)
def test_where_heads_are_counted_outside_of_the_blocks_the_units_can_be_cut_alone(name):
    model = models.randomize(HALF[name]())
    for kind, fits in (("ffn", True), ("heads", False)):
        smaller = copy.deepcopy(model)
        for site in anatomy(smaller).of(kind):
            keep_units(smaller, site, list(range(0, site.units, 2)))
        if fits:
            smaller(**TOKENS)
        else:
            with pytest.raises(RuntimeError, match=r"size|shapes"):
                smaller(**TOKENS)


def test_a_layer_that_derives_from_one_of_torchs_is_seen_as_what_it_is_and_without_values():
    class SamePadding(nn.Conv2d):
        pass

    counts = read_sizes(nn.Sequential(SamePadding(4, 8, 3, groups=2)))["counts"]
    assert (counts["0.groups"], counts["0.out_channels"]) == (2, 8)
    with torch.device("meta"):
        module = transformers.BertModel(transformers.BertConfig(**models.TEXT))
    assert len(anatomy(module).sites) == 2


@pytest.mark.parametrize("name", FOLDERS)
def test_blocks_are_found_inside_every_wrapper(name, tmp_path):
    found = anatomy(load_source(FOLDERS[name](tmp_path / "model")).module)
    assert [site.units for site in found.of("ffn")] == ([128] * 2 if name == "GPT-2" else [64] * 2)
    assert [site.units for site in found.of("heads")] == ([2, 2] if name == "Llama" else [4, 4])


def test_heads_that_share_their_keys_are_one_unit_and_a_fused_layer_has_queries_keys_and_values_in_a_row(tmp_path):
    module = load_source(models.save_llama(tmp_path / "model")).module
    site = anatomy(module).sites[0]["heads"]
    assert site.width == 16, "two heads of eight"
    assert [source.width for source in site.sources] == [16, 8, 8]
    module = load_source(models.save_gpt2(tmp_path / "model")).module
    site = anatomy(module).sites[0]["heads"]
    assert [(source.width, source.start) for source in site.sources] == [(8, 0), (8, 32), (8, 64)]


def test_a_model_without_blocks_is_refused_with_what_prunes_it():
    with pytest.raises(SourceError, match=r"no transformer blocks.* \(prune\.channels\)"):
        anatomy(models.ResidualNet())
    with pytest.raises(SourceError, match=r"no transformer blocks.* factorize\.low-rank"):
        anatomy(models.BiLstm())


def test_the_stages_for_channels_and_for_blocks_do_not_recommend_one_another():
    for name in ("DeiT", "XLM-R"):
        model, inputs = build(name)
        with pytest.raises(UsageError, match=r"Use prune\.heads and prune\.ffn"):
            find_channel_groups(model, {key: value[:, :] for key, value in inputs.items()})
        anatomy(model)


def test_of_a_mixed_network_the_convolutions_are_pruned_by_channels_and_the_blocks_by_their_units():
    config = transformers.MobileViTConfig(
        image_size=32, hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 64], num_attention_heads=2
    )
    model = models.randomize(transformers.MobileViTModel(config)).eval()
    groups = find_channel_groups(model, {"pixel_values": torch.randn(2, 3, 32, 32)})
    blocks = anatomy(model).blocks
    assert groups
    assert not [member for group in groups for member in group.members if member.path.startswith(blocks)]


def test_the_blocks_of_two_models_are_those_of_both_and_each_config_is_found_once(tmp_path):
    config = transformers.BertConfig(**models.TEXT)
    found = anatomy(nn.ModuleList([transformers.BertModel(config), transformers.BertModel(config)]))
    assert len(found.sites) == 4
    assert found.stacks == ("0.encoder.layer", "1.encoder.layer")
    module = load_source(models.save_vit(tmp_path / "model")).module
    assert [type(config) for _, config in iterate_configs(module)] == [transformers.ViTConfig]


@pytest.mark.parametrize("kind", ["heads", "ffn"])
def test_a_layer_may_be_read_without_being_called(kind):
    """EVA's attention multiplies by the weight of its layer itself, so that no input of it is seen."""
    site = Site(kind=kind, block=0, consumer="out", units=4, width=1, sources=())
    state, y = torch.zeros(2, 3, 4), torch.ones(2, 3, 4)
    assert torch.equal(find_residual(site, state, state + y, {"x": state, "y": y}, []), state)
