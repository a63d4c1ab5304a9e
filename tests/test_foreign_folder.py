"""Folders that transformers did not write are named for what they are."""

import json

import pytest

from laconic.errors import SourceError
from laconic.models.source_loading import load_source

CONFIG = {"model_type": "bert", "architectures": ["BertForSequenceClassification"]}
FOLDERS = {
    "diffusers": ({"model_index.json": {"_class_name": "Pipeline"}}, "pipeline of diffusers"),
    "no weights": ({"config.json": CONFIG, "quantize_config.json": {"bits": 4}}, r"has no model\.safetensors"),
    "bitsandbytes": (
        {"config.json": CONFIG | {"quantization_config": {"quant_method": "bitsandbytes"}}},
        "quantized already, by bitsandbytes",
    ),
    "MLX": ({"config.json": CONFIG | {"quantization": {"bits": 4}}}, "quantized already, by MLX"),
    "Flax": ({"config.json": CONFIG, "flax_model.msgpack": ""}, "weights of Flax"),
    "TensorFlow": ({"config.json": CONFIG, "tf_model.h5": ""}, "weights of TensorFlow"),
    "ONNX": ({"config.json": CONFIG, "model.onnx": ""}, r"Give the \.onnx file itself"),
    "GGUF": ({"config.json": CONFIG, "a.gguf": "", "b.gguf": ""}, "in several GGUF files"),
    "Git LFS": (
        {"config.json": CONFIG, "model.safetensors": "version https://git-lfs.github.com/spec/v1\n"},
        "git lfs pull",
    ),
    "a list": ({"config.json": []}, "no settings by name"),
    "no class": ({"config.json": {"model_type": "bert"}}, r"which class .* Name the --task"),
    "another head": (
        {"config.json": {"model_type": "bert", "architectures": ["BertForNextSentencePrediction"]}},
        "holds a BertForNextSentencePrediction, and no task is for its head",
    ),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_named_for_what_it_is(name, tmp_path):
    files, said = FOLDERS[name]
    for path, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / path).write_text(text, encoding="utf-8")
    with pytest.raises(SourceError, match=said):
        load_source(tmp_path)
