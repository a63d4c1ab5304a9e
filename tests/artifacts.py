"""Little artifacts and tasks for tests: whole, sealed, and answered by the fake engine."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from laconic.artifacts.manifest import GOLDEN, MANIFEST, MEASURED, MODEL, REPORT, Manifest
from laconic.artifacts.verdict import Comparison, Verdict
from laconic.hardware import this_machine
from laconic.hashing import digest_file, seal
from laconic.tasks.text_embedding import TextEmbedding
from laconic.tensor import TensorSpec
from laconic.timing.measurements import Measurements

X = TensorSpec(name="x", dtype="float32", shape=("batch", 3))
Y = TensorSpec(name="y", dtype="float32", shape=("batch", 3))
PASSED = Verdict(
    parity=(Comparison(subject="graph", against="module", samples=4, figures={"mean": 1.0}, required={"mean": 0.999}),),
    drift=(
        Comparison(subject="artifact", against="original", samples=4, figures={"mean": 1.0}, required={"mean": 0.9}),
    ),
)
FAILED = PASSED.model_copy(update={"drift": (PASSED.drift[0].model_copy(update={"figures": {"mean": 0.5}}),)})


def write_artifact(
    path: Path, *, verdict: Verdict | None = PASSED, assets: dict[str, bytes] | None = None, **model: Any
) -> Path:
    """A sealed artifact of the task `tensors`, x [batch, 3] to y = 2 x. model: settings of the fake engine's model."""
    path.mkdir(parents=True, exist_ok=True)
    (path / MODEL).write_text(json.dumps(model))
    x = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
    save_file({"0.input.x": x, "0.output.y": x * np.float32(model.get("factor", 2))}, path / GOLDEN)
    for name, content in (assets or {}).items():
        (path / name).write_bytes(content)
    (path / REPORT).write_text("<!doctype html><title>report</title>", encoding="utf-8")
    manifest = Manifest(
        task="tensors",
        inputs=(X,),
        outputs=(Y,),
        target="cpu",
        placement="fake",
        compute="float32",
        precision={},
        source={"name": "twice"},
        history=(),
        recipe={},
        verdict=verdict,
        versions={"fake": "1"},
        data={},
        licence=None,
        files={name: digest_file(path / name) for name in (MODEL, GOLDEN, *(assets or {}))},
    )
    measured = Measurements(
        machine=this_machine(),
        timings=(),
        knee=4,
        stages={},
        peak_memory=1,
        original_size=100,
        report=digest_file(path / REPORT).sha256,
    )
    (path / MANIFEST).write_bytes(seal(manifest.model_dump(mode="json")))
    (path / MEASURED).write_bytes(seal(measured.model_dump(mode="json")))
    return path


def tiny_tokenizer(words: str = "the cat sat on a mat and looked at red blue green birds") -> Tokenizer:
    """One token a word; [PAD] is 0 and any other word is [UNK], 1."""
    vocabulary = {"[PAD]": 0, "[UNK]": 1} | {word: number for number, word in enumerate(words.split(), 2)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def text_inputs(longest: int = 16) -> tuple[TensorSpec, ...]:
    """What a BERT takes, less the token types."""
    return tuple(
        TensorSpec(name=name, dtype="int64", shape=("batch", "seq"), bounds={"seq": (1, longest)})
        for name in ("input_ids", "attention_mask")
    )


def embedding_task(longest: int = 16) -> TextEmbedding:
    """A task that reads text, without a model."""
    return TextEmbedding(tiny_tokenizer(), text_inputs(longest), max_tokens=longest, pad_id=0)


def write_keys(folder: Path, name: str = "key", key: Any = None, encryption: Any = None) -> tuple[Path, Path]:
    """The files of a private and a public key; with cryptography."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = key or ec.generate_private_key(ec.SECP256R1())
    pem, unencrypted = serialization.Encoding.PEM, serialization.NoEncryption()
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    private.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, encryption or unencrypted))
    public.write_bytes(key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    return private, public
