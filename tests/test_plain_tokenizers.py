"""Models whose tokenizer adds no special tokens, as those of GPT-2 and Qwen2: an empty text has no tokens at all."""

import json
import random

import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import laconic
from laconic.data.reader import read
from laconic.errors import DataError

WORDS = ["<eos>", "<unk>", "a", "good", "bad", "film", "plot", "the", "was", "very"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A classifier by GPT-2 with random weights, and texts of its words."""
    folder = tmp_path_factory.mktemp("plain")
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", pad_token="<eos>", unk_token="<unk>", model_max_length=32
    ).save_pretrained(folder / "model")
    config = transformers.GPT2Config(
        vocab_size=len(WORDS), n_positions=32, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0,
        pad_token_id=0, num_labels=2,
    )  # fmt: skip
    transformers.GPT2ForSequenceClassification(config).save_pretrained(folder / "model")
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS[2:], k=draw.randint(3, 20))) for _ in range(120)]
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return folder


def test_they_are_compressed(laconic, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("LACONIC_CACHE", str(tmp_path / "cache"))
    code, _, err = laconic(
        "compress", folder / "model", "--data", folder / "texts.jsonl", "--engine-only", "onnxruntime",
        "--fidelity", "0", "-o", tmp_path / "out",
    )  # fmt: skip
    assert "Traceback" not in err
    assert (tmp_path / "out" / "manifest.json").is_file(), err
    assert code in (0, 3)


def test_their_fragments_for_calibration_have_tokens_and_an_empty_text_is_refused_with_its_row(folder, tmp_path):
    task = laconic.load(folder / "model").task
    pieces = task.fragments(["a good film", " ", "very bad"], 30)
    assert pieces
    assert all(task.tokenizer.encode(piece).ids for piece in pieces)
    task = laconic.load(folder / "model").task
    (tmp_path / "rows.jsonl").write_text('{"text": "a film"}\n{"text": " "}\n')
    with pytest.raises(DataError, match=r"row 2: the text is empty, and the model's tokenizer adds no token"):
        read(tmp_path / "rows.jsonl", task)
