"""Causal language models: loaded, saved and opened again, and what training takes of them."""

import models
import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy

from laconic.errors import SourceError
from laconic.models import language_model
from laconic.models.language_model import disable_packing_detection
from laconic.models.source_loading import load_source
from train.objectives.next_token import NextToken
from train.step.objective import TARGETS

TEXTS = ["hello world", "the model answers every question about its weights", "a", ""]
SAVED = {"gpt2": models.save_gpt2, "llama": models.save_llama}


@pytest.fixture(scope="module", params=SAVED)
def folder(request, tmp_path_factory):
    return SAVED[request.param](tmp_path_factory.mktemp(request.param) / "source")


@pytest.fixture(scope="module")
def checkpoint(folder):
    return load_source(folder)


def tensors(checkpoint, texts):
    return {name: torch.from_numpy(array) for name, array in checkpoint.task.encode(texts).items()}


def test_the_distribution_behind_each_text_is_the_models_own_whatever_it_is_padded_to(folder, checkpoint):
    assert checkpoint.task.name == "text-generation"
    assert checkpoint.task.max_tokens == 64
    names = [spec.name for spec in checkpoint.outputs]
    assert names == ["probabilities", "tokens", "log_likelihoods"]
    own = transformers.AutoModelForCausalLM.from_pretrained(folder)
    together = checkpoint.module(**tensors(checkpoint, TEXTS))
    for row, text in enumerate(TEXTS):
        encoded = tensors(checkpoint, [text])
        ids, place = encoded["input_ids"], encoded["input_ids"].shape[1] - 1
        expected = own(ids).logits[0].softmax(dim=-1)
        torch.testing.assert_close(together["probabilities"][row, place], expected[-1], atol=1e-5, rtol=1e-5)
        likelihoods = expected[:-1].gather(1, ids[0, 1:, None])[:, 0].log()
        torch.testing.assert_close(together["log_likelihoods"][row, :place], likelihoods, atol=1e-5, rtol=1e-4)
        assert checkpoint.module.choose_next(ids, torch.ones_like(ids)) == expected[-1].argmax()


def test_a_language_model_is_saved_with_its_ties_and_opens_as_it_was(checkpoint, tmp_path):
    checkpoint.save(tmp_path / "saved")
    again = load_source(tmp_path / "saved")
    assert again.key == checkpoint.key
    assert again.task.assets() == checkpoint.task.assets()
    inputs = tensors(checkpoint, TEXTS)
    assert_equal = torch.testing.assert_close
    assert_equal(again.module(**inputs), checkpoint.module(**inputs), atol=0, rtol=0)
    tables = [each.model.get_input_embeddings().weight for each in (checkpoint.module, again.module)]
    tied = checkpoint.module.model.config.model_type == "gpt2"
    assert [
        table is each.head.weight for table, each in zip(tables, (checkpoint.module, again.module), strict=True)
    ] == [tied] * 2


def test_without_a_mask_the_fast_kernel_is_taken_and_positions_are_not_searched(checkpoint, monkeypatch):
    seen = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def spy(*args, **kwargs):
        seen.append((kwargs.get("attn_mask"), kwargs.get("is_causal")))
        return attend(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    ids = torch.arange(12).reshape(2, 6)
    plain = checkpoint.module.hidden(ids)
    assert seen == [(None, True)] * 2
    torch.testing.assert_close(plain, checkpoint.module.hidden(ids, torch.ones_like(ids)))
    find = transformers.masking_utils.find_packed_sequence_indices
    with pytest.raises(ZeroDivisionError), disable_packing_detection():
        raise ZeroDivisionError
    assert transformers.masking_utils.find_packed_sequence_indices is find


def test_texts_that_share_a_row_do_not_see_one_another(checkpoint):
    first, second = torch.tensor([[5, 6, 7]]), torch.tensor([[9, 8]])
    packed = checkpoint.module.hidden(torch.cat([first, second], dim=1), position_ids=torch.tensor([[0, 1, 2, 0, 1]]))
    torch.testing.assert_close(packed[:, :3], checkpoint.module.hidden(first), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(packed[:, 3:], checkpoint.module.hidden(second), atol=1e-5, rtol=1e-5)


def test_a_text_without_a_token_begins_as_the_model_does(checkpoint):
    checkpoint.task.tokenizer.post_processor = None
    try:
        batch = checkpoint.task.encode(["", "a b"])
        assert batch["input_ids"].tolist() == [[2, 0], batch["input_ids"][1].tolist()]
        assert batch["attention_mask"].tolist() == [[1, 0], [0, 1]]
        assert checkpoint.task.encode([""])["input_ids"].tolist() == [[2]]
    finally:
        checkpoint.task.tokenizer.post_processor = models.tokenizer().post_processor


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("Cohere", {"logit_scale": 0.5}),
        ("Granite", {"logits_scaling": 3.0}),
        ("Gemma2", {"final_logit_softcapping": 0.2, "head_dim": 16}),
    ],
)
def test_logits_are_scaled_and_capped_as_the_model_does(tmp_path, kind, settings):
    settings |= {"num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 3}
    config = getattr(transformers, f"{kind}Config")(**models.TEXT, **settings)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    checkpoint = load_source(models.save_transformer(tmp_path / "m", model))
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        found, wanted = checkpoint.module(ids, torch.ones_like(ids))["probabilities"], model(ids).logits
        loss = NextToken(checkpoint.task).loss(checkpoint.module, {"input_ids": ids[:, :3], TARGETS: ids[:, 1:]})
    torch.testing.assert_close(found, wanted.softmax(dim=-1))
    torch.testing.assert_close(loss, cross_entropy(wanted[0, :3], ids[0, 1:], reduction="sum"))


def test_a_model_that_bends_its_logits_in_another_way_or_sees_what_follows_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(language_model, "SCALES", {})
    config = transformers.CohereConfig(
        **models.TEXT, num_key_value_heads=2, logit_scale=0.5, pad_token_id=0, eos_token_id=3
    )
    folder = models.save_transformer(tmp_path / "m", transformers.CohereForCausalLM(config))
    with pytest.raises(SourceError, match="more than its head makes"):
        load_source(folder)
    folder = models.save_bert(tmp_path / "m", transformers.BertLMHeadModel)
    with pytest.raises(SourceError, match="see those that follow"):
        load_source(folder)
