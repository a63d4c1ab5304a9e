"""Where blocks, heads and feed-forward units are found, and what is said where there are none."""

import models
import pytest
import torch
import transformers
from torch import nn

from compress.transformer.anatomy import FAMILIES, anatomy, iterate_configs
from laconic.errors import SourceError
from laconic.models.checkpoint import load_source

FOLDERS = {
    "BERT, embedder": (models.save_embedder, "BERT and RoBERTa"),
    "BERT, classifier": (models.save_bert, "BERT and RoBERTa"),
    "RoBERTa": (models.save_roberta, "BERT and RoBERTa"),
    "DistilBERT": (models.save_distilbert, "DistilBERT"),
    "ViT": (models.save_vit, "ViT"),
    "GPT-2": (models.save_gpt2, "GPT-2"),
    "Llama": (models.save_llama, "Llama"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_each_architecture_is_known_inside_its_wrapper(name, tmp_path):
    save, family = FOLDERS[name]
    found = anatomy(load_source(save(tmp_path / "model")).module)
    assert found.family.name == family
    assert [site.units for site in found.of("ffn")] == ([128] * 2 if name == "GPT-2" else [64] * 2)
    assert [site.units for site in found.of("heads")] == ([2, 2] if name == "Llama" else [4, 4])


def test_heads_that_share_their_keys_are_one_unit(tmp_path):
    module = load_source(models.save_llama(tmp_path / "model")).module
    site = anatomy(module).sites[0]["heads"]
    assert site.width == 16, "two heads of eight"
    assert [source.width for source in site.sources] == [16, 8, 8]


def test_a_fused_layer_has_queries_keys_and_values_one_after_another(tmp_path):
    module = load_source(models.save_gpt2(tmp_path / "model")).module
    site = anatomy(module).sites[0]["heads"]
    assert [(source.width, source.start) for source in site.sources] == [(8, 0), (8, 32), (8, 64)]


def test_a_model_without_known_blocks_is_refused_with_those_that_are_known():
    with pytest.raises(SourceError, match="no stacks") as caught:
        anatomy(models.ResidualNet())
    assert all(family.name in str(caught.value) for family in FAMILIES)


def test_a_block_with_a_part_that_is_not_known_is_refused(tmp_path):
    module = load_source(models.save_llama(tmp_path / "model")).module
    for block in module.get_submodule("model.model.layers"):
        block.post_feedforward_layernorm = nn.LayerNorm(32)
    with pytest.raises(SourceError, match="built like"):
        anatomy(module)


def test_two_stacks_are_refused():
    config = transformers.BertConfig(**models.TEXT)
    with pytest.raises(SourceError, match="2 stacks"):
        anatomy(nn.ModuleList([transformers.BertModel(config), transformers.BertModel(config)]))


def test_each_config_is_found_once(tmp_path):
    module = load_source(models.save_vit(tmp_path / "model")).module
    assert [type(config) for _, config in iterate_configs(module)] == [transformers.ViTConfig]


def test_models_that_are_built_like_bert_are_cut_like_bert():
    config = transformers.ElectraConfig(**models.TEXT, embedding_size=32)
    assert anatomy(transformers.ElectraModel(config)).family.name == "BERT and RoBERTa"


def test_anatomy_needs_no_values():
    with torch.device("meta"):
        module = transformers.BertModel(transformers.BertConfig(**models.TEXT))
    assert len(anatomy(module).sites) == 2
