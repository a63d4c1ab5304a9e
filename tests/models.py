"""Tiny models of the kinds that people bring, with random weights, and the folders that transformers makes of them."""

import io
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn
from transformers.utils import torch_compilable_check

from laconic.artifacts.record import Record
from laconic.tasks.text import WORDS
from laconic.tensor import TensorSpec

IMAGE = TensorSpec(name="image", dtype="float32", shape=("batch", 3, 16, 16))
SEQUENCE = TensorSpec(name="x", dtype="float32", shape=("batch", "seq", 6), bounds={"seq": (1, 64)})


class ResidualNet(nn.Module):
    """Convolutions, batch normalisation, a residual sum: [batch, 3, 16, 16] to [batch, classes]."""

    def __init__(self, classes: int = 4, width: int = 16) -> None:
        super().__init__()
        self.inputs = (IMAGE,)
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(width)
        self.body = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.body_norm = nn.BatchNorm2d(width)
        self.head = nn.Linear(width, classes)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem_norm(self.stem(image)).relu()
        x = (x + self.body_norm(self.body(x))).relu()
        return self.head(x.mean(dim=(2, 3)))


class MobileNet(nn.Module):
    """Depthwise separable convolutions with HardSwish, free height and width."""

    def __init__(self, classes: int = 4, width: int = 16) -> None:
        super().__init__()
        self.inputs = (
            IMAGE.model_copy(
                update={
                    "shape": ("batch", 3, "height", "width"),
                    "bounds": {"height": (8, 64), "width": (8, 64)},
                }
            ),
        )
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.Hardswish())
        self.depthwise = nn.Sequential(
            nn.Conv2d(width, width, 3, 1, 1, groups=width, bias=False), nn.BatchNorm2d(width), nn.Hardswish()
        )
        self.pointwise = nn.Sequential(nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width))
        self.head = nn.Linear(width, classes)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        x = x + self.pointwise(self.depthwise(x))
        return self.head(x.mean(dim=(2, 3)))


class BiLstm(nn.Module):
    """Two layers, both directions: [batch, seq, 6] to [batch, seq, 3]."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.inputs = (SEQUENCE,)
        self.lstm = nn.LSTM(6, hidden, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(2 * hidden, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


class Enclosing(nn.Module):
    """A module whose attribute has the name that DataParallel uses."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(4, 2)

    def forward(self, x):
        return self.module(x)


class Perceptron(nn.Module):
    """Linear layers of the given widths."""

    def __init__(self, widths: list[int], bias: bool = True) -> None:
        super().__init__()
        layers = [nn.Linear(a, b, bias=bias) for a, b in pairwise(widths)]
        self.layers = nn.ModuleList(layers)
        self.inputs = (TensorSpec(name="x", dtype="float32", shape=("batch", widths[0])),)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        return self.layers[-1](x)


class Tied(nn.Module):
    """An embedding whose table is also the last layer, and a buffer that is not saved."""

    def __init__(self, words: int = 20, width: int = 8) -> None:
        super().__init__()
        self.inputs = (TensorSpec(name="ids", dtype="int64", shape=("batch", "seq"), bounds={"seq": (1, 32)}),)
        self.table = nn.Embedding(words, width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width), persistent=False)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        hidden = self.table(ids).mean(dim=1) * self.scale
        return {"logits": self.head(hidden), "hidden": hidden}


def randomize(module: nn.Module, seed: int = 0) -> nn.Module:
    """Random weights and statistics, in evaluation mode."""
    generator = torch.Generator().manual_seed(seed)
    for value in module.state_dict().values():
        if value.is_floating_point():
            value.copy_(torch.rand(value.shape, generator=generator) * 0.4 + (0.3 if value.ndim == 1 else -0.2))
    return module.eval()


def tokenizer() -> Tokenizer:
    """Whole words, as BERT joins one text or two."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS, "hello", "world", "a", "b"]
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return made


TEXT = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}


def save_transformer(folder: Path, model: transformers.PreTrainedModel) -> Path:
    """The folder that transformers writes, with a tokenizer, and with random weights that matter."""
    randomize(model)
    model.save_pretrained(folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"pad_token": "[PAD]", "model_max_length": 10**30, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def save_bert(folder: Path, kind: type[transformers.PreTrainedModel] | None = None, **settings: object) -> Path:
    """BERT, as a classifier of three classes unless another class is given."""
    named = {"id2label": {0: "no", 1: "maybe", 2: "yes"}, "label2id": {"no": 0, "maybe": 1, "yes": 2}}
    config = transformers.BertConfig(**{**TEXT, **named, **settings})
    saved = save_transformer(folder, (kind or transformers.BertForSequenceClassification)(config))
    tokens = json.loads((saved / "tokenizer_config.json").read_text())
    names = ["input_ids", "token_type_ids", "attention_mask"]
    (saved / "tokenizer_config.json").write_text(json.dumps(tokens | {"model_input_names": names}))
    return saved


def save_masked_bert(folder: Path) -> Path:
    """BERT as a masked language model, and a tokenizer with a mask."""
    save_bert(folder, transformers.BertForMaskedLM, num_hidden_layers=1)
    masked = tokenizer()
    masked.add_special_tokens(["[MASK]"])
    masked.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"mask_token": "[MASK]"}))
    return folder


def save_distilbert(folder: Path, layers: int = 2) -> Path:
    """DistilBERT, as a classifier of two classes."""
    config = transformers.DistilBertConfig(
        vocab_size=40, dim=32, n_layers=layers, n_heads=4, hidden_dim=64, max_position_embeddings=64
    )
    return save_transformer(folder, transformers.DistilBertForSequenceClassification(config))


def save_roberta(folder: Path, layers: int = 2) -> Path:
    """RoBERTa, bare: its positions begin after the padding token's id, so 66 places hold 64 tokens."""
    changes = {"num_hidden_layers": layers, "max_position_embeddings": 66, "pad_token_id": 1}
    config = transformers.RobertaConfig(**TEXT | changes)
    return save_transformer(folder, transformers.RobertaModel(config, add_pooling_layer=False))


def save_embedder(folder: Path, *modules: tuple[str, dict[str, object]], layers: int = 2) -> Path:
    """A folder of sentence-transformers: MiniLM's shape, mean pooling and normalisation unless `modules` says else."""
    save_bert(folder, transformers.BertModel, num_hidden_layers=layers)
    chain = modules or (("Pooling", {"pooling_mode_mean_tokens": True}), ("Normalize", {}))
    entries = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for number, (kind, config) in enumerate(chain, 1):
        path = folder / f"{number}_{kind}"
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config))
        entries.append(
            {"idx": number, "name": str(number), "path": path.name, "type": f"sentence_transformers.models.{kind}"}
        )
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 48}))
    return folder


def save_gpt2(folder: Path, layers: int = 2) -> Path:
    """GPT-2, whose head is its table of words."""
    config = transformers.GPT2Config(
        vocab_size=40, n_embd=32, n_layer=layers, n_head=4, n_positions=64, bos_token_id=2, eos_token_id=3
    )
    return save_transformer(folder, transformers.GPT2LMHeadModel(config))


def save_llama(folder: Path, layers: int = 2) -> Path:
    """Llama, two heads to a key, with a head of its own."""
    changes = {"num_hidden_layers": layers, "num_key_value_heads": 2, "tie_word_embeddings": False}
    config = transformers.LlamaConfig(**TEXT | changes, bos_token_id=2, eos_token_id=3)
    return save_transformer(folder, transformers.LlamaForCausalLM(config))


def save_t5_encoder(folder: Path) -> Path:
    """T5's encoder, with relative positions and so without a longest text."""
    config = transformers.T5Config(vocab_size=40, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    return save_transformer(folder, transformers.T5EncoderModel(config))


def save_bart(folder: Path) -> Path:
    """BART as a classifier, which reads the token that ends a text."""
    config = transformers.BartConfig(
        vocab_size=40, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64, pad_token_id=0,
        bos_token_id=2, eos_token_id=3, decoder_start_token_id=3, id2label={0: "no", 1: "yes"},
    )  # fmt: skip
    return save_transformer(folder, transformers.BartForSequenceClassification(config))


def save_t5(folder: Path, **generation: object) -> Path:
    """T5, which writes a text: gated feed-forward layers, and a head of its own. generation: its settings."""
    config = transformers.T5Config(
        vocab_size=40, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu",
        tie_word_embeddings=False, pad_token_id=0, eos_token_id=3, decoder_start_token_id=0,
    )  # fmt: skip
    return save_writer(folder, transformers.T5ForConditionalGeneration(config), **generation)


def save_bart_writer(folder: Path, **generation: object) -> Path:
    """BART, which writes a text. generation: its settings."""
    config = transformers.BartConfig(
        vocab_size=40, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64, pad_token_id=0,
        bos_token_id=2, eos_token_id=3, decoder_start_token_id=3,
    )  # fmt: skip
    return save_writer(folder, transformers.BartForConditionalGeneration(config), **generation)


def save_writer(folder: Path, model: transformers.PreTrainedModel, **generation: object) -> Path:
    """The folder of an encoder-decoder that writes differently for different texts."""
    save_transformer(folder, model)
    for name, value in model.named_parameters():
        # With biases, or smaller weights, it would write one token again and again.
        value.data *= 3.0 if value.ndim > 1 else 0.0 if name.endswith("bias") else 1.0
    for name, value in generation.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(folder)
    return folder


def save_whisper(folder: Path, *, whole: bool = True, times: int = 3, **generation: object) -> Path:
    """Whisper for recordings of a second in two languages, with all its settings of generation; without `whole` those
    of a model for English. Its tokens are bytes. times: the number of timestamps, of which it needs 51."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["startoftranscript", "en", "fr", "translate", "transcribe", "nospeech", "notimestamps"]
    tokens = transformers.WhisperTokenizer(vocab={letter: index for index, letter in enumerate(letters)}, merges=[])
    tokens.add_special_tokens({"additional_special_tokens": [f"<|{name}|>" for name in names]})
    tokens.add_tokens([f"<|{number / 50:.2f}|>" for number in range(times)])
    ids = {name: tokens.convert_tokens_to_ids(f"<|{name}|>") for name in ("endoftext", *names)}
    end, start = ids["endoftext"], ids["startoftranscript"]
    config = transformers.WhisperConfig(
        vocab_size=len(tokens), d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=16, max_source_positions=50,
        max_target_positions=40, pad_token_id=end, bos_token_id=end, eos_token_id=end, decoder_start_token_id=start,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    several = {
        "is_multilingual": True,
        "lang_to_id": {f"<|{name}|>": ids[name] for name in ("en", "fr")},
        "task_to_id": {name: ids[name] for name in ("transcribe", "translate")},
    }
    settings = {
        "_from_model_config": False,  # of those which are, transformers reads no settings of Whisper alone
        "no_timestamps_token_id": ids["notimestamps"],
        "suppress_tokens": [start, ids["nospeech"], ids["en"], *range(ids["notimestamps"] + 1, len(tokens))],
        "begin_suppress_tokens": [letters.index("Ġ"), end],
        "max_length": 24,
        **(several if whole else {"is_multilingual": False}),
    }
    save_writer(folder, transformers.WhisperForConditionalGeneration(config), **settings | generation)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    tokens.save_pretrained(folder)
    transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1).save_pretrained(folder)
    return folder


def save_mixtral(folder: Path) -> Path:
    """A mixture of four experts, two of them for each token, in one layer."""
    config = transformers.MixtralConfig(
        **TEXT | {"num_hidden_layers": 1},
        num_key_value_heads=2,
        bos_token_id=2,
        eos_token_id=3,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    return save_transformer(folder, transformers.MixtralForCausalLM(config))


def save_mamba(folder: Path) -> Path:
    """A state-space model, whose recurrence is a loop in Python."""
    config = transformers.MambaConfig(
        vocab_size=40, hidden_size=32, state_size=4, num_hidden_layers=1, pad_token_id=0, bos_token_id=2, eos_token_id=3
    )
    return save_transformer(folder, transformers.MambaForCausalLM(config))


class Bags(nn.Module):
    """Embedding bags beside dense features, as recommenders have them: the exporter makes a Loop of the bags."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = (
            TensorSpec(name="dense", dtype="float32", shape=("batch", 4)),
            TensorSpec(name="words", dtype="int64", shape=("batch", 3)),
        )
        self.bag = nn.EmbeddingBag(10, 8, mode="mean")
        self.bottom = nn.Linear(4, 8)
        self.top = nn.Linear(16, 2)

    def forward(self, dense: Tensor, words: Tensor) -> Tensor:
        return self.top(torch.cat([self.bottom(dense).relu(), self.bag(words)], dim=1))


def save_vit(folder: Path, layers: int = 2) -> Path:
    """ViT on images of 16 x 16."""
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
        id2label={0: "cat", 1: "dog", 2: "fish"},
        label2id={"cat": 0, "dog": 1, "fish": 2},
    )
    model = randomize(transformers.ViTForImageClassification(config))
    model.save_pretrained(folder)
    settings = {"size": {"height": 16, "width": 16}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def save_segformer(folder: Path) -> Path:
    """SegFormer on images of 64 x 64, which tells three classes apart."""
    config = transformers.SegformerConfig(
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 16, 24, 32],
        num_attention_heads=[1, 2, 2, 4],
        decoder_hidden_size=16,
        id2label={0: "sky", 1: "road", 2: "tree"},
        label2id={"sky": 0, "road": 1, "tree": 2},
    )
    randomize(transformers.SegformerForSemanticSegmentation(config)).save_pretrained(folder)
    settings = {"image_processor_type": "SegformerImageProcessor", "size": {"height": 64, "width": 64}}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


LETTERS = ("<pad>", "<unk>", "|", *"ETAOI")
"""The tokens that a speech model writes with."""


def save_wav2vec2(
    folder: Path, kind: str = "wav2vec2", *, norm: str = "layer", pitches: tuple[str, ...] = (), layers: int = 2
) -> Path:
    """A relative of wav2vec 2.0 with a frame of 10 ms, which writes LETTERS, or tells `pitches` apart."""
    numbers = {name: number for number, name in enumerate(pitches)}
    settings: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "conv_dim": (16, 16, 32),
        "conv_kernel": (10, 8, 4),
        "conv_stride": (5, 8, 4),
        "num_feat_extract_layers": 3,
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 4,
        "feat_extract_norm": norm,
        "do_stable_layer_norm": norm == "layer",
        "vocab_size": len(LETTERS),
        **({"id2label": dict(enumerate(pitches)), "label2id": numbers} if pitches else {}),
    }
    config = transformers.CONFIG_MAPPING[kind](**settings)
    auto = transformers.AutoModelForAudioClassification if pitches else transformers.AutoModelForCTC
    torch.manual_seed(0)
    model = auto.from_config(config)
    with torch.no_grad():
        (model.classifier if pitches else model.lm_head).weight.normal_()
    model.save_pretrained(folder)
    transformers.Wav2Vec2FeatureExtractor(return_attention_mask=norm == "layer").save_pretrained(folder)
    if not pitches:
        (folder / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(LETTERS)}))
        tokens = {"bos_token": None, "eos_token": None}
        transformers.Wav2Vec2CTCTokenizer(str(folder / "vocab.json"), **tokens).save_pretrained(folder)
    return folder


COLOURS = {0: "red", 1: "green", 2: "blue"}
SIDES = {"size": {"shortest_edge": 48, "longest_edge": 80}}
"""The size of inputs of detectors; sides are free."""


def save_detector(folder: Path, family: str, *, sharp: float = 4.0, **processor: Any) -> Path:
    """A detector of three classes: Detr, ConditionalDetr, DeformableDetr, RTDetr or Yolos.

    sharp: the factor of the weights behind its logits, so that some scores are high.
    """
    named = {"id2label": COLOURS, "label2id": {label: number for number, label in COLOURS.items()}}
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForObjectDetection")(make_detector_config(family, named)).eval()
    for name, layer in model.named_modules():
        if isinstance(layer, nn.BatchNorm2d) or type(layer).__name__.endswith("FrozenBatchNorm2d"):
            layer.running_var.fill_(0.3)
        if isinstance(layer, nn.Linear):
            is_head = layer.out_features in (3, 4) and ("class" in name or "score" in name)
            nn.init.normal_(layer.weight, std=(sharp if is_head else 1.0) / layer.in_features**0.5)
            nn.init.zeros_(layer.bias)
    model.save_pretrained(folder)
    settings = {"image_processor_type": f"{family}ImageProcessor", **SIDES, **processor}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def make_detector_config(family: str, named: dict[str, Any]) -> transformers.PreTrainedConfig:
    """The config of a small detector. named: the names of its classes."""
    if family == "Yolos":
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
        return transformers.YolosConfig(**sizes, image_size=[48, 64], num_detection_tokens=10, **named)
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    depth = {"encoder_layers": 1, "decoder_layers": 2 if family == "DeformableDetr" else 1}
    layers = {"num_queries": 10, "d_model": 32, **depth, **heads, **named}
    maps = {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1] * 4, "layer_type": "basic"}
    levels = {"out_features": ["stage2", "stage3", "stage4"]}
    if family == "RTDetr":
        backbone = transformers.RTDetrResNetConfig(**maps, **levels)
        inner = {"encoder_in_channels": [16, 24, 32], "decoder_in_channels": [32] * 3, "encoder_hidden_dim": 32}
        return transformers.RTDetrConfig(backbone_config=backbone, num_denoising=4, **inner, **layers)
    plain = {"use_timm_backbone": False, "backbone": None, "use_pretrained_backbone": False, "dropout": 0.0}
    features = levels if family == "DeformableDetr" else {"out_features": ["stage4"]}
    backbone = transformers.ResNetConfig(**maps, **features)
    return getattr(transformers, f"{family}Config")(backbone_config=backbone, **plain, **layers)


class Keep:
    """A stage that keeps the first layers of a perceptron: a structural change, and its replay."""

    @staticmethod
    def rebuild(module: Perceptron, record: Record) -> None:
        del module.layers[record.config["layers"] :]


class Counted:
    """A stage whose structural change is a buffer that is computed from a weight and not saved."""

    @staticmethod
    def rebuild(module: nn.Module, record: Record) -> None:
        count = torch.ones_like(next(module.parameters())).sum()
        module.register_buffer("count", count, persistent=False)


def fail() -> nn.Module:
    """A factory that fails."""
    raise RuntimeError("no such luck")


def no_module() -> int:
    """A factory of something else."""
    return 3


def unsigned(inputs: int = 4) -> nn.Module:
    """A module that does not say what it takes."""
    return nn.Linear(inputs, 2)


class Difference(nn.Module):
    """Two inputs of one shape, told apart; the output is called like an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = tuple(TensorSpec(name=name, dtype="float32", shape=("batch", 4)) for name in ("a", "b"))

    def forward(self, b: Tensor, a: Tensor) -> dict[str, Tensor]:
        return {"relu": (a - b).relu() - b}


class Amplifier(nn.Module):
    """Nothing but the rounding of sums, amplified."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = (TensorSpec(name="x", dtype="float32", shape=("batch", 64)),)

    def forward(self, x: Tensor) -> Tensor:
        return (x.sum(dim=1) - (x / 3).sum(dim=1) * 3) * 1e6


class Checked(transformers.PreTrainedModel):
    """A check of values, as transformers makes it while it is traced."""

    def __init__(self) -> None:
        super().__init__(transformers.PreTrainedConfig())
        self.inputs = (TensorSpec(name="x", dtype="float32", shape=("batch", 4)),)

    def forward(self, x: Tensor) -> Tensor:
        torch_compilable_check(x.abs().sum() >= 0, "expected numbers")
        return x.relu()


class Inverted(nn.Module):
    """A mask of integers, and what is not masked."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = (
            TensorSpec(name="mask", dtype="int64", shape=("batch", 4)),
            TensorSpec(name="x", dtype="float32", shape=("batch", 4)),
        )

    def forward(self, mask: Tensor, x: Tensor) -> Tensor:
        return x * (1.0 - mask)


class Branching(nn.Module):
    """Control flow that depends on the values: no graph."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = (TensorSpec(name="x", dtype="float32", shape=("batch", 4)),)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum() > 0 else x


class Recurrent(nn.Module):
    """A recurrence in Python, which an export unrolls."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = (SEQUENCE,)

    def forward(self, x: Tensor) -> Tensor:
        states = [x[:, 0]]
        for place in range(1, x.shape[1]):
            states.append((states[-1] + x[:, place]).tanh())
        return torch.stack(states, dim=1)


class Noisy(nn.Module):
    """Dropout that is never switched off: two runs differ."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = (TensorSpec(name="x", dtype="float32", shape=("batch", 64)),)
        self.layer = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.layer(x), training=True)


class Repeated(nn.Module):
    """One tensor as two outputs, an input and a constant as outputs; an optional input is left out, one is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = tuple(TensorSpec(name=name, dtype="float32", shape=("batch", 4)) for name in ("x", "y", "unused"))

    def forward(self, x: Tensor, z: Tensor | None = None, y: Tensor | None = None, unused: Tensor | None = None) -> Any:
        total = x + (y if z is None else z)
        return {"one": total, "two": total, "same": x, "constant": torch.ones(3), "nothing": None}


class Strided(nn.Module):
    """Convolutions in one dimension: the output is shorter than the input, by an axis of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = (TensorSpec(name="x", dtype="float32", shape=("batch", 2, "length"), bounds={"length": (7, 99)}),)
        self.first = nn.Conv1d(2, 4, 3, stride=2)
        self.second = nn.Conv1d(4, 4, 3, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


def png(image: Image.Image) -> bytes:
    """The bytes of a file."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
