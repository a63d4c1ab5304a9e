"""Encoder-decoders of transformers, and what is compared of every family that writes."""

import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import soundfile
import torch
import transformers
from family_checkpoint import IDS, MAX_LENGTH, SAMPLES, TRANSLATOR, WORDS, WRITER, Family, text
from torch import Tensor

from export.placements.split_decoder import split_decoder
from export.sources import capture_graph
from laconic.cache import Cache
from laconic.models.checkpoint import Checkpoint
from laconic.models.source import CheckpointSource
from laconic.runtimes.model_session import open_model
from laconic.runtimes.onnxruntime import OnnxRuntime
from laconic.tasks.decoder_tensors import SEQUENCES

T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
BART = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 3,
}
WRITER_FAMILIES: dict[str, Family] = {
    "T5": text("T5", WRITER, **IDS, **T5),
    "T5 1.1": text("T5", WRITER, **IDS, **T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "mT5": text("MT5", WRITER, **IDS, **T5),
    "UMT5": text("UMT5", WRITER, **IDS, **T5),
    "LongT5": text("LongT5", WRITER, **IDS, **T5, encoder_attention_type="local"),
    "Switch Transformers": text("SwitchTransformers", WRITER, **IDS, **T5, num_experts=4),
    "BART writer": text("Bart", WRITER, **IDS, **BART),
    "mBART": text("MBart", WRITER, **IDS, **BART),
    "Marian": text("Marian", TRANSLATOR, **IDS, **BART),
    "PEGASUS": text("Pegasus", WRITER, **IDS, **BART),
    "M2M-100": text("M2M100", WRITER, **IDS, **BART),
    "Blenderbot": text("Blenderbot", WRITER, **IDS, **BART),
    "PLBart": text("PLBart", WRITER, **IDS, **BART),
    "LED": text("LED", WRITER, **IDS, **{key: each for key, each in BART.items() if "positions" not in key},
        max_encoder_position_embeddings=64, max_decoder_position_embeddings=64, attention_window=16,
    ),
    "ProphetNet": text("ProphetNet", WRITER, **IDS, hidden_size=64, num_encoder_layers=2, num_decoder_layers=2,
        num_encoder_attention_heads=4, num_decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128,
        max_position_embeddings=64, decoder_start_token_id=2,
    ),
}  # fmt: skip


def write_targets(path: Path) -> Path:
    """Texts of random words, each with a shorter one to write for it."""
    rng = np.random.default_rng(0)
    rows = ["text,target"]
    for _ in range(SAMPLES):
        rows.append(",".join(" ".join(rng.choice(WORDS, rng.integers(3, most))) for most in (30, 12)))
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def compare_written(
    family: Family, source: Path, checkpoint: Checkpoint, samples: list[Any]
) -> Iterator[tuple[Tensor, Tensor]]:
    """The tokens that the captured graphs write for each sample in FP32, and those of transformers' greedy search."""
    model: Any = getattr(transformers, f"{family.config}{family.head}").from_pretrained(source).eval()
    settings = checkpoint.task.generation
    assert settings is not None
    limit = {} if family.writes else {"max_new_tokens": MAX_LENGTH}
    settings = settings.model_copy(update=limit)
    with TemporaryDirectory() as folder:
        graph = capture_graph(CheckpointSource.of(checkpoint), Cache())
        parts = Path(folder) / "model.onnx"
        shutil.copy(graph.path, parts)
        split_decoder(parts)
        with open_model(parts, OnnxRuntime().open, settings) as session:
            for value in samples:
                sample = checkpoint.task.parse(value)
                prompt = prepare(family, source, value)
                wanted = model.generate(**prompt, num_beams=1, do_sample=False, **limit)[0]
                # Without the start token, or the prompt of a model that is a decoder alone.
                start = 0 if family.reads == "sounds" else 1 if family.writes else prompt["input_ids"].shape[1]
                wanted = wanted[start:]
                written = session.run(checkpoint.task.encode_request(sample))[SEQUENCES][0]
                yield torch.from_numpy(written[: len(wanted)]), wanted


def prepare(family: Family, source: Path, value: Any) -> Any:
    """What the model reads of a text, or of the bytes of a recording, as transformers prepares it."""
    if family.reads == "sounds":
        extractor = transformers.AutoFeatureExtractor.from_pretrained(source)
        waveform, rate = soundfile.read(io.BytesIO(value), dtype="float32")
        return extractor(waveform, sampling_rate=rate, return_tensors="pt")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    return tokenizer(value, return_tensors="pt", return_token_type_ids=False)
