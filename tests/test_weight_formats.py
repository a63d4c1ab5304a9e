"""Checkpoints that other programs have quantized open with the weights that their formats define."""

import json
import shutil
from pathlib import Path

import models
import numpy as np
import pytest
import torch
import transformers
from rank_processes import by_two_ranks
from safetensors.torch import load_file, save_file

from laconic import registry
from laconic.cache import Cache
from laconic.errors import FormatRefused, SourceError
from laconic.models.quantized_weights import share_float_weights
from laconic.models.source_loading import load_source
from laconic.weight_formats.weight_format import WeightFormat
from train.parallel.mesh import Mesh
from train.parallel.ranks import open_ranks
from train.parallel.shared_folder import share_folder

TASK = "text-generation"
GROUP = 16
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""The outputs that AWQ packs into a word, from its lowest bits on."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small Llama in float."""
    return models.save_llama(tmp_path_factory.mktemp("float") / "llama")


def pack(columns, bits):
    """Pack a list of columns of integers into one of words, a bit at a time."""
    word = np.zeros(len(columns[0]), np.int64)
    for place, column in enumerate(columns):
        word |= column.astype(np.int64) << (place * bits)
    return torch.from_numpy(word.astype(np.uint32).view(np.int32))


def pack_rows(matrix, bits, order=None):
    """Pack each row of a matrix into words."""
    count = 32 // bits
    parts = [matrix[:, start : start + count] for start in range(0, matrix.shape[1], count)]
    return torch.stack([pack([part[:, place] for place in order or range(count)], bits) for part in parts], dim=1)


def write_gptq(weight, settings, rng):
    """A weight in GPTQ's layout, and what it stands for."""
    bits, inputs = settings["bits"], weight.shape[1]
    groups = inputs // GROUP
    integers = rng.integers(0, 1 << bits, (inputs, len(weight)))
    zeros = rng.integers(1, 1 << bits, (groups, len(weight)))
    scales = rng.uniform(0.01, 0.1, (groups, len(weight))).astype(np.float16)
    index = np.arange(inputs) // GROUP
    if settings["desc_act"]:
        rng.shuffle(index)
    stored = zeros - (settings.get("checkpoint_format") != "gptq_v2")
    parts = {
        "qweight": pack_rows(integers.T, bits).T.contiguous(),
        "qzeros": pack_rows(stored, bits),
        "scales": torch.from_numpy(scales),
        "g_idx": torch.from_numpy(index.astype(np.int32)),
    }
    return parts, ((integers - zeros[index]) * scales[index].astype(np.float32)).T


def write_awq(weight, settings, rng):
    """A weight in AWQ's layout, and what it stands for."""
    inputs = weight.shape[1]
    index = np.arange(inputs) // GROUP
    integers = rng.integers(0, 16, (inputs, len(weight)))
    zeros = rng.integers(0, 16, (inputs // GROUP, len(weight)))
    scales = rng.uniform(0.01, 0.1, zeros.shape).astype(np.float16)
    parts = {
        "qweight": pack_rows(integers, 4, ORDER),
        "qzeros": pack_rows(zeros, 4, ORDER),
        "scales": torch.from_numpy(scales),
    }
    return parts, ((integers - zeros[index]) * scales[index].astype(np.float32)).T


def write_compressed(weight, settings, rng):
    """A weight in compressed-tensors' layout with zeros, which transformers does not read, and what it stands for."""
    rows, inputs = weight.shape
    index = np.arange(inputs) // GROUP
    integers, zeros = rng.integers(0, 16, (rows, inputs)), rng.integers(0, 16, (rows, inputs // GROUP))
    scales = rng.uniform(0.01, 0.1, zeros.shape).astype(np.float32)
    parts = {
        "weight_packed": pack_rows(integers, 4),
        "weight_zero_point": pack_rows(zeros.T, 4).T.contiguous(),
        "weight_scale": torch.from_numpy(scales),
        "weight_shape": torch.tensor([rows, inputs]),
    }
    return parts, (integers - zeros[:, index]) * scales[:, index]


def write_float8(weight, settings, rng):
    """A weight in FP8 with a scale for each row, as compressed-tensors stores it, and what it stands for."""
    whole = torch.from_numpy(rng.uniform(-400, 400, weight.shape).astype(np.float32)).to(torch.float8_e4m3fn)
    scales = rng.uniform(0.001, 0.01, (len(weight), 1)).astype(np.float32)
    return {"weight": whole, "weight_scale": torch.from_numpy(scales)}, whole.float().numpy() * scales


PACKED = {
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": GROUP}}},
    "format": "pack-quantized",
}
FORMATS = {
    "gptq": (write_gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}),
    "gptq-order": (write_gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}),
    "gptq-v2-8": (
        write_gptq,
        {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "desc_act": False, "checkpoint_format": "gptq_v2"},
    ),
    "awq": (write_awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "float8": (
        write_float8,
        {"quant_method": "compressed-tensors", "format": "float-quantized"}
        | {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}}},
    ),
    "compressed-tensors": (write_compressed, {"quant_method": "compressed-tensors"} | PACKED),
}


def quantize_folder(folder, destination, name, *, shards=1):
    """A folder in one of FORMATS; and its weights by name, as the format defines them."""
    write, settings = FORMATS[name]
    shutil.copytree(folder, destination)
    weights = load_file(destination / "model.safetensors")
    rng, stored, expected = np.random.default_rng(0), {}, {}
    for key, weight in weights.items():
        if not key.endswith(tuple(f"{layer}.weight" for layer in LINEAR)):
            stored[key] = weight
            continue
        parts, expected[key] = write(weight, settings, rng)
        stored |= {f"{key.removesuffix('weight')}{part}": tensor for part, tensor in parts.items()}
    (destination / "model.safetensors").unlink()
    if shards == 1:
        save_file(stored, destination / "model.safetensors")
    else:
        places = {key: f"model-{number % shards}.safetensors" for number, key in enumerate(stored)}
        for file in set(places.values()):
            save_file({key: stored[key] for key in stored if places[key] == file}, destination / file)
        (destination / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    change_settings(destination, settings)
    return expected


def change_settings(folder, settings):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_weights_open_as_their_format_defines_them(folder, tmp_path, name):
    expected = quantize_folder(folder, tmp_path / "packed", name, shards=2 if name == "awq" else 1)
    checkpoint = load_source(tmp_path / "packed", task=TASK)
    weights = checkpoint.module.model.state_dict()
    for key, weight in expected.items():
        np.testing.assert_array_equal(weights[key].numpy(), weight.astype(np.float32), err_msg=key)
    assert checkpoint.size == sum(path.stat().st_size for path in (tmp_path / "packed").glob("*.safetensors"))
    assert "quantization_config" not in checkpoint.source["config"]
    checkpoint.save(tmp_path / "saved")
    assert load_source(tmp_path / "saved").key == checkpoint.key


@pytest.mark.parametrize("name", registry.WEIGHT_FORMATS)
def test_every_format_keeps_the_contract(name):
    kind = registry.resolve("weight format", name)
    assert issubclass(kind, WeightFormat)
    assert kind.parts
    assert any(settings["quant_method"] == name for _, settings in FORMATS.values())
    with pytest.raises(FormatRefused):
        kind.read({"bits": 5})


@pytest.mark.parametrize(("bits", "strategy"), [(4, "group"), (8, "channel")])
def test_what_compressed_tensors_wrote_gives_the_logits_of_transformers(folder, tmp_path, bits, strategy):
    library = pytest.importorskip("compressed_tensors.quantization")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    size = {"group_size": GROUP} if strategy == "group" else {}
    arguments = library.QuantizationArgs(num_bits=bits, strategy=strategy, symmetric=True, **size)
    scheme = library.QuantizationScheme(targets=["Linear"], weights=arguments)
    groups = {"group_0": scheme}
    settings = library.QuantizationConfig(
        config_groups=groups, ignore=["lm_head"], quantization_status="frozen", format="pack-quantized"
    )
    library.apply_quantization_config(model, settings)
    for layer in model.modules():
        if hasattr(layer, "quantization_scheme"):
            layer.weight_scale.data.uniform_(0.01, 0.02)
    compressor = compressors.ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    shutil.copytree(folder, tmp_path / "packed")
    model.save_pretrained(tmp_path / "packed")
    compressor.update_config(tmp_path / "packed")
    ids = torch.arange(4, 24)[None]
    original = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.float32)
    with torch.no_grad():
        logits = load_source(tmp_path / "packed", task=TASK).module.model(input_ids=ids).logits
        torch.testing.assert_close(logits, original(input_ids=ids).logits, rtol=0, atol=0)


REFUSED = {
    "bits": ("gptq", {"bits": 3}, "integers of 3 bits"),
    "layout": ("awq", {"version": "gemv"}, "layout 'gemv'"),
    "format": ("compressed-tensors", {"format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized is not read"),
    "method": ("gptq", {"quant_method": "quip"}, "quantized already, by quip"),
    "method's form": ("gptq", {"quant_method": ["gptq"]}, "not of their form. Expected a mapping"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_are_not_read_are_named(folder, tmp_path, name):
    form, changes, said = REFUSED[name]
    shutil.copytree(folder, tmp_path / "packed")
    change_settings(tmp_path / "packed", FORMATS[form][1] | changes)
    with pytest.raises(SourceError, match=said):
        load_source(tmp_path / "packed", task=TASK)


def test_a_part_or_a_shard_that_is_missing_is_named(folder, tmp_path):
    quantize_folder(folder, tmp_path / "packed", "awq", shards=2)
    (tmp_path / "packed" / "model-1.safetensors").unlink()
    with pytest.raises(SourceError, match=r"lacks model-1\.safetensors"):
        load_source(tmp_path / "packed", task=TASK)
    quantize_folder(folder, tmp_path / "cut", "gptq")
    weights = load_file(tmp_path / "cut" / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    del weights[f"{name}.scales"]
    save_file(weights, tmp_path / "cut" / "model.safetensors")
    with pytest.raises(SourceError, match=rf"{name} has the tensors g_idx, qweight, qzeros.*do not make a weight"):
        load_source(tmp_path / "cut", task=TASK)


def test_settings_in_a_file_of_their_own_are_read(folder, tmp_path):
    expected = quantize_folder(folder, tmp_path / "packed", "gptq")
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    settings = config.pop("quantization_config")
    del settings["quant_method"]
    (tmp_path / "packed" / "config.json").write_text(json.dumps(config))
    (tmp_path / "packed" / "quantize_config.json").write_text(json.dumps(settings))
    weights = load_source(tmp_path / "packed", task=TASK).module.model.state_dict()
    key = next(iter(expected))
    np.testing.assert_array_equal(weights[key].numpy(), expected[key].astype(np.float32))


def test_a_damaged_gguf_file_is_named(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(64))
    for source in (tmp_path, tmp_path / "model.gguf"):
        with pytest.raises(SourceError, match=r"model\.gguf does not load"):
            load_source(source, task=TASK)


def open_together(rank, folder):
    """A folder in BF16, opened by the ranks of this machine."""
    with open_ranks(torch.device("cpu"), Mesh()) as ranks:
        with share_folder(ranks, Cache(folder)) as shared, share_float_weights(Cache(shared)):
            checkpoint = load_source(folder / "model", task=TASK)
            mapped = str(shared) in Path("/proc/self/maps").read_text()
        total = sum(float(weight.double().sum()) for weight in checkpoint.module.parameters())
    (folder / f"{rank}.json").write_text(json.dumps([checkpoint.key, checkpoint.size, total, mapped]))


def test_ranks_of_a_machine_share_one_copy_of_16_bit_weights_in_float32(folder, tmp_path, monkeypatch):
    shutil.copytree(folder, tmp_path / "model")
    transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    alone = load_source(tmp_path / "model", task=TASK)
    total = sum(float(weight.double().sum()) for weight in alone.module.parameters())
    assert by_two_ranks(open_together, tmp_path, monkeypatch) == [0, 0]
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == [alone.key, alone.size, total, True]
    assert not list(tmp_path.glob(".shared*"))


def test_a_copy_that_cannot_be_written_and_one_of_a_damaged_model_are_refused(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float16)
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "file").touch()
    with (
        share_float_weights(Cache(tmp_path / "file")),
        pytest.raises(SourceError, match="Set LACONIC_CACHE to a folder"),
    ):
        load_source(tmp_path / "model", task=TASK)
    weights = load_file(tmp_path / "model" / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    with (
        share_float_weights(Cache(tmp_path / "cache")),
        pytest.raises(SourceError, match=f"^{tmp_path}/model has no w"),
    ):
        load_source(tmp_path / "model", task=TASK)
