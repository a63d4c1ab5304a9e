"""Whatever people have a trained model in is opened, or refused with a sentence; and what is saved opens as it was."""

import json
import math
import subprocess
import sys
from pathlib import Path

import models
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

from laconic.artifacts.record import Record
from laconic.errors import SourceError, UntrustedSource, UsageError
from laconic.hashing import seal, unseal
from laconic.models.checkpoint import CARD, WEIGHTS, Checkpoint
from laconic.models.image_processor import read_preprocess
from laconic.models.source_loading import is_onnx, load_source
from laconic.models.torch_session import TorchSession
from laconic.models.weights import scan_weights
from laconic.tensor import TensorSpec

TEXTS = ["hello world", "a model answers every question", "the"]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    return models.save_embedder(tmp_path_factory.mktemp("models") / "embedder")


def tensors(checkpoint, samples=TEXTS):
    return {name: torch.from_numpy(array) for name, array in checkpoint.task.encode(samples).items()}


def answer(checkpoint, inputs):
    return TorchSession(checkpoint.module, checkpoint.inputs, checkpoint.outputs).run(inputs)


def perceptron(folder, widths=(4, 8, 3), name="model.safetensors", **options):
    module = models.randomize(models.Perceptron(list(widths)))
    path = folder / name
    save_file(module.state_dict(), path) if name.endswith(".safetensors") else torch.save(module.state_dict(), path)
    options = {"builder": "models:Perceptron", "arguments": {"widths": list(widths)}, **options}
    return module, path, options


# Folders of transformers


def test_an_embedder_pools_and_normalizes_inside_the_module(embedder):
    checkpoint = load_source(embedder)
    inputs = tensors(checkpoint)
    hidden = checkpoint.module.encoder(**inputs).last_hidden_state
    mask = inputs["attention_mask"][..., None]
    expected = nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
    torch.testing.assert_close(checkpoint.module(**inputs), expected)
    assert checkpoint.task.name == "text-embedding"
    assert checkpoint.task.max_tokens == 48
    assert [(spec.name, spec.shape) for spec in checkpoint.outputs] == [("embedding", ("batch", 32))]
    assert checkpoint.inputs[0].bounds == {"seq": (1, 48)}
    assert checkpoint.size == (embedder / "model.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        ([("Pooling", {"pooling_mode_cls_token": True})], lambda hidden, mask: hidden[:, 0]),
        (
            [("Pooling", {"pooling_mode": "max"})],
            lambda hidden, mask: torch.stack(
                [row[: int(n)].amax(0) for row, n in zip(hidden, mask.sum(1), strict=True)]
            ),
        ),
    ],
)
def test_pooling_is_read_from_its_config(tmp_path, modules, expected):
    checkpoint = load_source(models.save_embedder(tmp_path / "m", *modules))
    inputs = tensors(checkpoint)
    hidden = checkpoint.module.encoder(**inputs).last_hidden_state
    torch.testing.assert_close(checkpoint.module(**inputs), expected(hidden, inputs["attention_mask"]))


def test_a_dense_module_is_loaded(tmp_path):
    dense = ("Dense", {"in_features": 32, "out_features": 6, "activation_function": "torch.nn.modules.activation.Tanh"})
    folder = models.save_embedder(tmp_path / "m", ("Pooling", {"pooling_mode": "cls"}), dense)
    weights = {"linear.weight": torch.randn(6, 32), "linear.bias": torch.randn(6)}
    save_file(weights, folder / "2_Dense" / "model.safetensors")
    checkpoint = load_source(folder)
    inputs = tensors(checkpoint)
    pooled = checkpoint.module.encoder(**inputs).last_hidden_state[:, 0]
    expected = torch.tanh(pooled @ weights["linear.weight"].T + weights["linear.bias"])
    torch.testing.assert_close(checkpoint.module(**inputs), expected)


def test_what_happens_before_the_tokenizer_is_kept_or_refused(tmp_path):
    folder = models.save_embedder(tmp_path / "m")
    tokenizer = models.tokenizer()
    tokenizer.normalizer = None
    tokenizer.save(str(folder / "tokenizer.json"))
    assert load_source(folder).task.encode(["HELLO"])["input_ids"][0, 1] == 1
    (folder / "sentence_bert_config.json").rename(folder / "sentence_roberta_config.json")
    (folder / "sentence_roberta_config.json").write_text(json.dumps({"max_seq_length": 20, "do_lower_case": True}))
    checkpoint = load_source(folder)
    assert (
        checkpoint.task.encode(["HELLO"])["input_ids"].tolist()
        == checkpoint.task.encode(["hello"])["input_ids"].tolist()
    )
    assert checkpoint.task.max_tokens == 20
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"default_prompt_name": "query"}))
    with pytest.raises(SourceError, match="query"):
        load_source(folder)


@pytest.mark.parametrize(
    ("modules", "complaint"),
    [
        ([("Pooling", {"pooling_mode": "mean"}), ("LSTM", {})], "'LSTM'"),
        ([("Pooling", {"pooling_mode_weightedmean_tokens": True})], "pooling_mode_weightedmean_tokens"),
        ([("Pooling", {"pooling_mode": ["mean", "max"]})], "mean and max"),
        ([("Normalize", {})], "no Pooling"),
        ([("Pooling", {"pooling_mode": "cls"}), ("Normalize", {}), ("Dense", {})], "Normalize"),
    ],
)
def test_a_module_that_is_not_known_is_refused_by_name(tmp_path, modules, complaint):
    folder = models.save_embedder(tmp_path / "m", *modules)
    for path in folder.glob("*_Dense/config.json"):
        path.write_text(json.dumps({"in_features": 32, "out_features": 6}))
    with pytest.raises(SourceError, match=complaint):
        load_source(folder)


def test_a_text_classifier_gives_the_logits_that_transformers_gives(tmp_path):
    folder = models.save_bert(tmp_path / "m")
    checkpoint = load_source(folder)
    inputs = tensors(checkpoint, [("hello world", "a model"), ("the", "a b")])
    original = transformers.BertForSequenceClassification.from_pretrained(folder, local_files_only=True).eval()
    torch.testing.assert_close(checkpoint.module(*inputs.values()), original(**inputs).logits, rtol=0, atol=0)
    assert [spec.name for spec in checkpoint.inputs] == ["input_ids", "attention_mask", "token_type_ids"]
    assert inputs["token_type_ids"].any()
    assert checkpoint.task.labels == ("no", "maybe", "yes")


def test_inputs_and_positions_and_labels_and_lengths_are_those_of_each_kind_of_folder(tmp_path):
    checkpoint = load_source(models.save_distilbert(tmp_path / "m"))
    assert [spec.name for spec in checkpoint.inputs] == ["input_ids", "attention_mask"]
    assert checkpoint.outputs[0].shape == ("batch", 2)
    checkpoint = load_source(models.save_roberta(tmp_path / "m"))
    assert checkpoint.task.max_tokens == 64
    ids = torch.full((1, 64), 5)
    assert checkpoint.module(ids, torch.ones_like(ids)).shape == (1, 32)
    checkpoint = load_source(models.save_vit(tmp_path / "m"))
    assert checkpoint.inputs[0].shape == ("batch", 3, 16, 16)
    assert checkpoint.task.preprocess.mean == (0.5, 0.5, 0.5)
    assert checkpoint.task.labels == ("cat", "dog", "fish")
    assert load_source(models.save_t5_encoder(tmp_path / "m")).task.max_tokens == 512


IMAGE_PROCESSORS = [
    ("Beit", {}),
    ("Bit", {}),
    ("CLIP", {}),
    ("ConvNext", {"size": {"shortest_edge": 224}}),
    ("ConvNext", {"size": {"shortest_edge": 384}}),
    ("DeiT", {}),
    ("EfficientNet", {}),
    ("EfficientNet", {"rescale_offset": True, "rescale_factor": 1 / 127.5, "image_std": [0.4, 0.5, 0.6]}),
    ("EfficientNet", {"include_top": False, "do_center_crop": True}),
    ("EfficientNet", {"do_normalize": False}),
    ("Levit", {}),
    ("Levit", {"size": {"height": 200, "width": 240}}),
    ("MobileNetV1", {}),
    ("MobileNetV2", {}),
    ("MobileViT", {"size": {"shortest_edge": 288}}),
    ("MobileViT", {"do_flip_channel_order": False, "do_normalize": True}),
    ("PoolFormer", {}),
    ("PoolFormer", {"crop_pct": None, "size": {"height": 224, "width": 224}}),
    ("PoolFormer", {"crop_pct": 0.95, "size": {"height": 224, "width": 240}}),
    ("Pvt", {}),
    ("Segformer", {}),
    ("Siglip", {}),
    ("ViT", {"size": {"height": 160, "width": 200}, "resample": 3}),
    ("ViT", {"do_rescale": False, "do_normalize": False}),
    ("ViT", {"do_resize": False}),
    ("Detr", {"size": {"shortest_edge": 224, "longest_edge": 300}}),
    ("RTDetr", {"size": {"height": 64, "width": 96}}),
    ("Yolos", {"size": {"shortest_edge": 224, "longest_edge": 300}}),
]


@pytest.mark.parametrize(("name", "settings"), IMAGE_PROCESSORS)
def test_images_are_prepared_as_by_transformers(name, settings, tmp_path):
    """Sizes at which rounding matters among them: 298.67 pixels are 298 in transformers."""
    own = getattr(transformers, f"{name}ImageProcessorPil")(**settings)
    own.save_pretrained(tmp_path)
    made = read_preprocess(tmp_path, channels=3)
    rng = np.random.default_rng(1)
    for height, width in ((480, 640), (33, 97), (225, 224), (1000, 90)):
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))
        expected = own(images=image, return_tensors="np")["pixel_values"][0]
        np.testing.assert_allclose(made.apply(image), expected, rtol=0, atol=1e-5)


def test_an_image_processor_that_is_unknown_or_missing_is_refused(tmp_path):
    transformers.PerceiverImageProcessorPil().save_pretrained(tmp_path)
    with pytest.raises(SourceError, match="PerceiverImageProcessor, whose rules Laconic does not know"):
        read_preprocess(tmp_path, channels=3)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "Unheard", "size": 20}))
    with pytest.raises(SourceError, match="transformers does not read"):
        read_preprocess(tmp_path, channels=3)
    folder = models.save_vit(tmp_path / "m")
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(SourceError, match=r"preprocessor_config.json is missing"):
        load_source(folder)


def test_transparent_and_grey_images_and_settings_that_are_left_out_are_as_by_transformers(tmp_path):
    own = transformers.CLIPImageProcessorPil()
    own.save_pretrained(tmp_path)
    made = read_preprocess(tmp_path, channels=3)
    rng = np.random.default_rng(1)
    for mode in ("RGBA", "LA"):
        image = Image.fromarray(rng.integers(0, 256, (600, 300, 4), np.uint8)).convert(mode)
        expected = own(images=image, return_tensors="np")["pixel_values"][0]
        np.testing.assert_allclose(made.apply(image), expected, rtol=0, atol=1e-5)
    own = transformers.ViTImageProcessorPil(image_mean=[0.4], image_std=[0.2])
    own.save_pretrained(tmp_path)
    made = read_preprocess(tmp_path, channels=1)
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (40, 60), np.uint8))
    expected = own(images=image, return_tensors="np")["pixel_values"][0]
    np.testing.assert_allclose(made.apply(image), expected, rtol=0, atol=1e-5)
    settings = {"image_processor_type": "MobileViTImageProcessor", "size": {"shortest_edge": 288}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    made = read_preprocess(tmp_path, channels=3)
    assert (made.shortest_edge, made.crop, made.bgr, made.mean) == (288, (256, 256), True, (0.0,))


def test_what_a_folder_lacks_is_named(tmp_path):
    vision = transformers.ViTModel(transformers.ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
    vision.save_pretrained(tmp_path / "vit")
    transformers.ViTImageProcessorPil().save_pretrained(tmp_path / "vit")
    with pytest.raises(SourceError, match=r"has no tokenizer but a preprocessor_config.json"):
        load_source(tmp_path / "vit", task="text-embedding")
    models.save_llama(tmp_path / "llama")
    with pytest.raises(SourceError, match="has no AutoModelForImageClassification for models of type llama"):
        load_source(tmp_path / "llama", task="image-classification")


def test_shards_are_read_and_a_missing_one_is_named(tmp_path, embedder):
    whole = load_source(models.save_bert(tmp_path / "whole"))
    model = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "whole", local_files_only=True)
    folder = models.save_bert(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="30KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    sharded = load_source(folder)
    inputs = tensors(whole)
    torch.testing.assert_close(sharded.module(**inputs), whole.module(**inputs), rtol=0, atol=0)
    assert sharded.key == whole.key
    shards[0].unlink()
    with pytest.raises(SourceError, match=shards[0].name):
        load_source(folder)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_raised_to_single_exactly(tmp_path, dtype):
    folder = models.save_bert(tmp_path / "m")
    transformers.BertForSequenceClassification.from_pretrained(folder, dtype=dtype).save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    checkpoint = load_source(folder)
    assert {value.dtype for value in stored.values()} == {dtype}
    for name, value in checkpoint.module.model.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, stored[name].float())


def test_a_folder_with_a_pytorch_bin_is_read_without_executing_it(tmp_path):
    folder = models.save_bert(tmp_path / "m")
    expected = load_source(folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    for name, value in load_source(folder).module.state_dict().items():
        assert torch.equal(value, expected.module.state_dict()[name])
    torch.save({"weights": nn.Linear(2, 2)}, folder / "pytorch_model.bin")
    with pytest.raises(SourceError, match="does not load"):
        load_source(folder)


def test_an_older_tokenizer_is_converted(tmp_path):
    folder = models.save_bert(tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(SourceError, match=r"no tokenizer.json"):
        load_source(folder)
    (folder / "vocab.txt").write_text("\n".join(models.tokenizer().get_vocab()))
    settings = {"tokenizer_class": "BertTokenizer", "pad_token": "[PAD]", "do_lower_case": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    words = sorted(models.tokenizer().get_vocab().items(), key=lambda item: item[1])
    (folder / "vocab.txt").write_text("\n".join(word for word, _ in words))
    ids = load_source(folder).task.encode(["Hello world"])["input_ids"]
    assert ids.tolist() == [models.tokenizer().encode("hello world").ids]


def test_an_architecture_for_another_task_or_a_head_that_would_be_random_is_refused_by_name(tmp_path, embedder):
    folder = models.save_bert(tmp_path / "m", transformers.BertForMultipleChoice)
    with pytest.raises(SourceError, match="BertForMultipleChoice"):
        load_source(folder)
    assert load_source(folder, task="text-embedding").task.name == "text-embedding"
    with pytest.raises(SourceError, match="random"):
        load_source(embedder, task="text-classification")
    folder = models.save_bert(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "problem_type": "multi_label_classification"}))
    assert load_source(folder).task.name == "multi-label-classification"


def test_a_model_that_brings_its_own_code_needs_trust(tmp_path):
    folder = models.save_bert(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "own",
        "auto_map": {
            "AutoConfig": "own_code.OwnConfig",
            "AutoModelForSequenceClassification": "own_code.OwnModel",
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own_code.py").write_text(
        "from transformers import BertConfig, BertForSequenceClassification\n"
        "class OwnConfig(BertConfig):\n    model_type = 'own'\n"
        "class OwnModel(BertForSequenceClassification):\n    config_class = OwnConfig\n"
    )
    with pytest.raises(UntrustedSource, match="--trust"):
        load_source(folder)
    checkpoint = load_source(folder, trust=True)
    checkpoint.save(tmp_path / "saved")
    with pytest.raises(UntrustedSource, match=r"own_code.py"):
        load_source(tmp_path / "saved")
    assert load_source(tmp_path / "saved", trust=True).key == checkpoint.key


def test_the_licence_is_the_one_that_the_readme_states(tmp_path):
    folder = models.save_bert(tmp_path / "m")
    assert load_source(folder).licence is None
    (folder / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n# A model\n")
    assert load_source(folder).licence == "apache-2.0"


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "modules.json"])
@pytest.mark.parametrize("keep", [0, 0.6])
def test_a_file_of_the_folder_that_is_cut_short_is_refused(tmp_path, name, keep):
    folder = models.save_embedder(tmp_path / "m")
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: int(keep * len(content))])
    with pytest.raises(SourceError, match=r"again"):
        load_source(folder)


def edit_json(path, **changes):
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def test_classes_without_names_are_named_as_by_transformers(tmp_path):
    models.save_bert(tmp_path)
    edit_json(tmp_path / "config.json", id2label=None, label2id=None, num_labels=3)
    checkpoint = load_source(tmp_path)
    assert checkpoint.task.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert checkpoint.task.labels == tuple(transformers.AutoConfig.from_pretrained(tmp_path).id2label.values())
    assert [checkpoint.task.index(label) for label in ("LABEL_2", 2, "2")] == [2, 2, 2]


def save_decoder_classifier(folder):
    models.save_gpt2(folder)
    config = transformers.AutoConfig.from_pretrained(folder, num_labels=3, pad_token_id=None)
    transformers.GPT2ForSequenceClassification(config).save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


def test_a_classifier_without_a_padding_token_takes_that_of_its_tokenizer(tmp_path):
    assert save_decoder_classifier(tmp_path).get("pad_token_id") is None
    edit_json(tmp_path / "tokenizer_config.json", pad_token="[PAD]")
    checkpoint = load_source(tmp_path)
    original = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    together = answer(checkpoint, checkpoint.task.encode(TEXTS))["logits"]
    for text, row in zip(TEXTS, together, strict=True):  # transformers alone takes one text a batch
        alone = original(input_ids=tensors(checkpoint, [text])["input_ids"]).logits[0]
        np.testing.assert_allclose(row, alone.detach(), atol=1e-5)
    checkpoint.save(tmp_path / "saved")
    assert Checkpoint.load(tmp_path / "saved").source["config"]["pad_token_id"] == checkpoint.task.pad_id


def test_a_classifier_without_any_padding_token_is_told_to_name_one(tmp_path):
    save_decoder_classifier(tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", pad_token=None)
    (tmp_path / "special_tokens_map.json").unlink(missing_ok=True)
    with pytest.raises(SourceError, match=r'Give its config\.json a "pad_token_id"'):
        load_source(tmp_path)
    edit_json(tmp_path / "config.json", pad_token_id=0)
    assert load_source(tmp_path).task.name == "text-classification"


# Weights with a builder


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt", "model.bin", "model.pth"])
def test_weights_are_loaded_into_what_the_builder_makes(tmp_path, name):
    module, path, options = perceptron(tmp_path, name=name)
    checkpoint = load_source(path, **options)
    x = torch.randn(5, 4)
    assert torch.equal(checkpoint.module(x), module(x))
    assert checkpoint.task.name == "tensors"
    assert checkpoint.outputs == (TensorSpec(name="output", dtype="float32", shape=("batch", 3)),)
    assert not checkpoint.module.training
    assert not any(parameter.requires_grad for parameter in checkpoint.module.parameters())


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: {"state_dict": state, "epoch": 3},
        lambda state: {"model": {f"module.{name}": value for name, value in state.items()}},
        lambda state: {f"module._orig_mod.{name}": value for name, value in state.items()},
        lambda state: {name: value.half() for name, value in state.items()},
    ],
)
def test_the_ways_in_which_training_scripts_save_are_understood(tmp_path, wrap):
    module, _, options = perceptron(tmp_path)
    torch.save(wrap(module.state_dict()), tmp_path / "model.pt")
    checkpoint = load_source(tmp_path / "model.pt", **options)
    for name, value in checkpoint.module.state_dict().items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, module.state_dict()[name], atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda state: state.pop("layers.1.bias"), r"1 missing \(layers.1.bias\)"),
        (lambda state: state.update(more=torch.zeros(1)), r"1 unexpected \(more\)"),
        (lambda state: state.update({"layers.0.bias": torch.zeros(9)}), r"layers.0.bias is \[9\], expected \[8\]"),
    ],
)
def test_weights_that_do_not_fit_are_named(tmp_path, change, complaint):
    module, path, options = perceptron(tmp_path)
    state = dict(module.state_dict())
    change(state)
    save_file(state, path)
    with pytest.raises(SourceError, match=complaint):
        load_source(path, **options)


@pytest.mark.parametrize(
    ("builder", "arguments", "complaint"),
    [
        ("models.Perceptron", {}, "package.module:factory"),
        ("nowhere:Perceptron", {}, "no module 'nowhere'"),
        ("models:Nothing", {}, "no 'Nothing'"),
        ("models:fail", {}, "RuntimeError: no such luck"),
        ("models:no_module", {}, "returned a int"),
        ("models:Perceptron", {"wrong": 1}, "TypeError"),
        ("models:Perceptron", {"widths": {1, 2}}, "plain values"),
        (None, {}, "--builder"),
    ],
)
def test_a_wrong_builder_is_refused_with_a_sentence(tmp_path, builder, arguments, complaint):
    _, path, _ = perceptron(tmp_path)
    with pytest.raises(SourceError, match=complaint):
        load_source(path, builder=builder, arguments=arguments)


def test_inputs_come_from_the_recipe_or_from_the_module(tmp_path):
    save_file(nn.Linear(4, 2).state_dict(), tmp_path / "m.safetensors")
    options = {"builder": "models:unsigned"}
    with pytest.raises(SourceError, match="`inputs`"):
        load_source(tmp_path / "m.safetensors", **options)
    inputs = (TensorSpec(name="x", dtype="float32", shape=("batch", 4)),)
    assert load_source(tmp_path / "m.safetensors", inputs=inputs, **options).outputs[0].shape == ("batch", 2)
    wrong = (TensorSpec(name="x", dtype="float32", shape=("batch", 5)),)
    with pytest.raises(SourceError, match="does not run"):
        load_source(tmp_path / "m.safetensors", inputs=wrong, **options)


def test_a_builder_can_make_an_image_classifier(tmp_path):
    save_file(models.randomize(models.ResidualNet()).state_dict(), tmp_path / "m.safetensors")
    options = {"builder": "models:ResidualNet"}
    checkpoint = load_source(tmp_path / "m.safetensors", task="image-classification", **options)
    assert checkpoint.task.preprocess.resize == (16, 16)
    with pytest.raises(SourceError, match="tokenizer"):
        load_source(tmp_path / "m.safetensors", task="text-classification", **options)
    _, path, options = perceptron(tmp_path, name="p.safetensors")
    with pytest.raises(SourceError, match="channels"):
        load_source(path, task="image-classification", **options)


def test_the_working_folder_holds_builders_and_hides_no_room(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "import export\nfrom models import Perceptron\nassert export.__file__ != __file__\n"
    )
    (tmp_path / "export.py").write_text("raise RuntimeError('this file hides the room')\n")
    _, path, _ = perceptron(tmp_path)
    monkeypatch.chdir(tmp_path)
    code = (
        "import sys; sys.path.append(sys.argv[2])\n"
        "from pathlib import Path; from laconic.models.source_loading import load_source\n"
        "before = list(sys.path)\n"
        "print(load_source(Path(sys.argv[1]), builder='mine:Perceptron', arguments={'widths': [4, 8, 3]}).key)\n"
        "assert sys.path == before\n"
    )
    # -P: as the console script starts, without the working folder on the path.
    command = [sys.executable, "-P", "-c", code, str(path), str(Path(models.__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# What executes code


def test_a_pickled_module_needs_trust_and_cannot_be_saved(tmp_path):
    module = models.randomize(models.Perceptron([4, 3]))
    torch.save(module, tmp_path / "m.pt")
    with pytest.raises(UntrustedSource, match="--trust"):
        load_source(tmp_path / "m.pt")
    with pytest.raises(UntrustedSource):
        load_source(tmp_path / "m.pt", builder="models:Perceptron", arguments={"widths": [4, 3]})
    checkpoint = load_source(tmp_path / "m.pt", trust=True)
    x = torch.randn(2, 4)
    assert torch.equal(checkpoint.module(x), module(x))
    with pytest.raises(SourceError, match="cannot be saved"):
        checkpoint.save(tmp_path / "saved")
    built = load_source(tmp_path / "m.pt", builder="models:Perceptron", arguments={"widths": [4, 3]}, trust=True)
    built.save(tmp_path / "saved")


def test_an_exported_program_needs_trust(tmp_path):
    module = models.randomize(models.Perceptron([4, 3]))
    program = torch.export.export(module, (torch.randn(2, 4),), dynamic_shapes=({0: torch.export.Dim("n", max=64)},))
    torch.export.save(program, tmp_path / "m.pt2")
    with pytest.raises(UntrustedSource, match=r"torch.export"):
        load_source(tmp_path / "m.pt2")
    checkpoint = load_source(tmp_path / "m.pt2", trust=True)
    assert checkpoint.inputs[0].shape == ("batch", 4)
    assert checkpoint.inputs[0].bounds["batch"][1] == 64
    x = torch.randn(3, 4)
    assert torch.equal(checkpoint.module(x), module(x))
    (tmp_path / "bad.pt2").write_bytes(b"PK")
    with pytest.raises(SourceError, match="does not load"):
        load_source(tmp_path / "bad.pt2", trust=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_is_refused(tmp_path):
    torch.jit.save(torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)), tmp_path / "m.pt")
    with pytest.raises(SourceError, match="TorchScript"):
        load_source(tmp_path / "m.pt", builder="models:unsigned")


@pytest.mark.parametrize("name", ["m.safetensors", "m.pt", "m.bin"])
@pytest.mark.parametrize("content", [b"", b"not weights at all", None])
def test_damaged_weights_are_refused(tmp_path, name, content):
    _, path, options = perceptron(tmp_path, name=name)
    path.write_bytes(path.read_bytes()[:-200] if content is None else content)
    with pytest.raises(SourceError):
        load_source(path, **options)


def test_sources_of_no_known_kind_are_refused(tmp_path):
    with pytest.raises(SourceError, match="does not exist"):
        load_source(tmp_path / "nothing")
    with pytest.raises(SourceError, match=r"config.json"):
        load_source(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(SourceError, match="is an artifact"):
        load_source(tmp_path)
    (tmp_path / "m.txt").write_text("hello")
    with pytest.raises(SourceError, match=r"m.txt is no file of weights"):
        load_source(tmp_path / "m.txt", builder="models:unsigned")
    (tmp_path / "m.onnx").write_bytes(b"")
    assert is_onnx(tmp_path / "m.onnx")
    with pytest.raises(SourceError, match="ONNX"):
        load_source(tmp_path / "m.onnx")


# Saved and opened again

SAVE = [models.save_embedder, models.save_bert, models.save_roberta, models.save_distilbert, models.save_vit]


def test_saving_gives_the_same_bytes_without_a_path_and_overwrites_a_checkpoint_and_nothing_else(tmp_path, embedder):
    for name in ("one", "two"):
        load_source(embedder).save(tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == ["model.json", "model.safetensors", "preprocess.json", "tokenizer.json"]
    for name in files:
        content = (tmp_path / "one" / name).read_bytes()
        assert content == (tmp_path / "two" / name).read_bytes()
        assert str(tmp_path).encode() not in content
        assert str(embedder).encode() not in content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]
    checkpoint = load_source(embedder)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="not be overwritten"):
        checkpoint.save(tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").exists()
    checkpoint.save(tmp_path / "saved")
    checkpoint.save(tmp_path / "saved")
    assert Checkpoint.load(tmp_path / "saved").key == checkpoint.key


@pytest.mark.parametrize("save", SAVE)
def test_every_kind_of_folder_opens_again_after_saving(tmp_path, save):
    checkpoint = load_source(save(tmp_path / "m"))
    checkpoint.save(tmp_path / "saved")
    again = load_source(tmp_path / "saved")
    inputs = checkpoint.task.typical(2, 7)
    expected, found = answer(checkpoint, inputs), answer(again, inputs)
    assert all(np.array_equal(expected[name], found[name]) for name in expected)
    assert again.task.assets() == checkpoint.task.assets()
    assert again.key == checkpoint.key
    assert (again.inputs, again.outputs, again.size) == (checkpoint.inputs, checkpoint.outputs, checkpoint.size)


def test_the_weights_of_a_saved_checkpoint_are_mapped_from_its_file(tmp_path, embedder):
    load_source(embedder).save(tmp_path / "saved")
    module = load_source(tmp_path / "saved").module
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(f"saved/{WEIGHTS}")]
    places = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    for weight in module.parameters():
        assert any(start <= weight.data_ptr() < end for start, end in places)


def test_a_model_that_computes_with_its_weights_while_it_is_built_is_opened_too(tmp_path, embedder):
    checkpoint = load_source(embedder)
    record = Record(stage="models:Counted", config={}, key="k")
    models.Counted.rebuild(checkpoint.module, record)
    checkpoint.after(record, checkpoint.module).save(tmp_path / "saved")
    again = Checkpoint.load(tmp_path / "saved", trust=True).module
    assert torch.equal(again.count, checkpoint.module.count)
    for name, weight in checkpoint.module.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight)


def test_tied_weights_are_saved_once_and_buffers_that_are_not_saved_are_there_after_loading(tmp_path):
    module = models.randomize(models.Tied())
    state = {name: value for name, value in module.state_dict().items() if name != "head.weight"}
    save_file(state, tmp_path / "m.safetensors")
    checkpoint = load_source(tmp_path / "m.safetensors", builder="models:Tied")
    checkpoint.save(tmp_path / "saved")
    again = Checkpoint.load(tmp_path / "saved", trust=True)
    assert len(load_file(tmp_path / "saved" / WEIGHTS)) == 1
    assert again.module.head.weight is again.module.table.weight
    ids = torch.arange(6).reshape(2, 3)
    assert torch.equal(again.module(ids)["logits"], module(ids)["logits"])
    state = models.randomize(models.Tied()).state_dict()
    state.pop("head.weight")
    save_file(state, tmp_path / "m.safetensors")
    load_source(tmp_path / "m.safetensors", builder="models:Tied").save(tmp_path / "saved")
    module = Checkpoint.load(tmp_path / "saved", trust=True).module
    torch.testing.assert_close(module.scale, torch.linspace(0.5, 1.5, 8))
    assert not any(value.is_meta for value in (*module.parameters(), *module.buffers()))


def test_structural_changes_are_replayed_on_loading(tmp_path):
    _, path, options = perceptron(tmp_path, widths=(4, 8, 8, 3))
    checkpoint = load_source(path, **options)
    record = Record(stage="models:Keep", config={"layers": 2}, key="k")
    models.Keep.rebuild(checkpoint.module, record)
    changed = checkpoint.after(record, checkpoint.module)
    changed.save(tmp_path / "saved")
    again = Checkpoint.load(tmp_path / "saved", trust=True)
    assert len(again.module.layers) == 2
    assert again.history == (record,)
    assert again.key == changed.key != checkpoint.key
    assert again.outputs[0].shape == ("batch", 8)


def test_a_checkpoint_that_names_code_is_opened_only_when_trusted(tmp_path):
    _, path, options = perceptron(tmp_path)
    load_source(path, **options).save(tmp_path / "saved")
    with pytest.raises(UntrustedSource, match="models:Perceptron"):
        load_source(tmp_path / "saved")
    load_source(tmp_path / "saved", trust=True)


@pytest.mark.parametrize(
    "change",
    [
        {"inputs": [{"name": "x"}]},
        {"source": {"kind": "pickled module"}},
        {"source": {"kind": "huggingface", "task": "text-embedding", "config": {"model_type": "nothing"}}},
        {"source": 3},
        {"format": 9},
        {"history": None},
        {"task": "os:system"},
    ],
)
def test_a_card_of_another_form_is_refused(tmp_path, embedder, change):
    load_source(embedder).save(tmp_path / "saved")
    card = {name: value for name, value in unseal(tmp_path / "saved" / CARD).items() if name != "sha256"}
    (tmp_path / "saved" / CARD).write_bytes(seal(card | change))
    with pytest.raises(SourceError):
        Checkpoint.load(tmp_path / "saved")


def test_batch_normalisation_needs_no_counter_and_the_key_follows_the_weights(tmp_path):
    state = models.randomize(models.ResidualNet()).state_dict()
    counters = [name for name in state if name.endswith("num_batches_tracked")]
    assert counters
    save_file({name: value for name, value in state.items() if name not in counters}, tmp_path / "m.safetensors")
    load_source(tmp_path / "m.safetensors", builder="models:ResidualNet")
    _, path, options = perceptron(tmp_path)
    first = load_source(path, **options)
    assert load_source(path, **options).key == first.key
    state = load_file(path)
    state["layers.0.bias"][0] += 1e-6
    save_file(state, path)
    assert load_source(path, **options).key != first.key


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (CARD, r"model\.json"),
        (WEIGHTS, "its weights were changed"),
        ("tokenizer.json", "does not read"),
    ],
)
def test_a_flipped_byte_is_found(tmp_path, embedder, name, said):
    load_source(embedder).save(tmp_path / "saved")
    content = bytearray((tmp_path / "saved" / name).read_bytes())
    content[-20] ^= 1
    (tmp_path / "saved" / name).write_bytes(content)
    with pytest.raises(SourceError, match=said):
        Checkpoint.load(tmp_path / "saved")


def test_a_task_that_is_another_one_is_told_from_other_weights(tmp_path, embedder):
    load_source(embedder).save(tmp_path / "saved")
    asset = tmp_path / "saved" / "preprocess.json"
    asset.write_text(asset.read_text().replace("48", "40"))
    with pytest.raises(SourceError, match="whose task text-embedding is not the same"):
        Checkpoint.load(tmp_path / "saved")


def test_torch_runs_on_its_own_threads_and_gives_the_others_back(tmp_path):
    _, path, options = perceptron(tmp_path)
    checkpoint = load_source(path, **options)
    seen = []
    checkpoint.module.register_forward_hook(lambda *_: seen.append(torch.get_num_threads()))
    TorchSession(checkpoint.module, checkpoint.inputs, checkpoint.outputs, 2).run({"x": np.zeros((1, 4), np.float32)})
    assert seen == [2]
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_weights_that_are_no_numbers_are_found_in_the_file(tmp_path, dtype, value):
    numbers = torch.linspace(-3e4, 3e4, 600_001).to(dtype)  # more than is read at once
    save_file({"a": numbers, "b": torch.arange(3)}, tmp_path / "a.safetensors")
    whole = scan_weights([tmp_path / "a.safetensors"])
    assert whole.finite
    save_file({"a": numbers}, tmp_path / "b.safetensors")
    save_file({"b": torch.arange(3)}, tmp_path / "c.safetensors", {"format": "pt"})
    assert scan_weights([tmp_path / "b.safetensors", tmp_path / "c.safetensors"]) == whole
    numbers[-1] = value
    save_file({"a": numbers, "b": torch.arange(3)}, tmp_path / "a.safetensors")
    found = scan_weights([tmp_path / "a.safetensors"])
    assert not found.finite
    assert found.digest != whole.digest


def test_a_checkpoint_of_an_earlier_version_is_opened_by_the_values_of_its_weights(tmp_path):
    original = load_source(models.save_bert(tmp_path / "m"))
    given = original.module, original.task
    old = Checkpoint.of(*given, outputs=original.outputs, source=original.source, size=original.size)
    old.save(tmp_path / "old")
    card = unseal(tmp_path / "old" / CARD)
    del card["weights"], card["stored"]
    (tmp_path / "old" / CARD).write_bytes(seal(card))
    assert Checkpoint.load(tmp_path / "old").key == old.key
