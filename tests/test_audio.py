"""Audio: recordings are read as by transformers, told apart and written down, learnt from, and served."""

import io
import json
from pathlib import Path

import models
import numpy as np
import pytest
import soundfile
import torch
import transformers
from contexts import tune
from hypothesis import given
from hypothesis import strategies as st
from served import running

from compress.pipeline import compress
from laconic.data.reader import read
from laconic.errors import DataError, InputError, SourceError
from laconic.metrics import count_edits
from laconic.models.source_loading import load_source
from laconic.models.speech import mask_frames, split_convolutions
from laconic.models.torch_session import TorchSession
from laconic.progress import Steps
from laconic.recipes.recipe import Recipe
from laconic.tasks.audio import make_tone
from laconic.tasks.audio_preprocess import MAX_SECONDS, AudioPreprocess, read_audio
from laconic.tasks.ctc_vocabulary import CtcVocabulary
from serve.batching.layout import Layout
from train.objectives.ctc_loss import align

QUIET = Steps(quiet=True)
RATE = 16_000
PITCHES = {"low": 200, "middle": 700, "high": 2500}
LENGTHS = (4000, 9000, 16_001)
"""Samples of the recordings that answers are compared on: several numbers of frames, even and odd."""


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    return models.save_wav2vec2(tmp_path_factory.mktemp("speech"))


def encode(waveform: np.ndarray, rate: int = RATE, kind: str = "WAV", subtype: str | None = "FLOAT") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, waveform, rate, format=kind, subtype=subtype)
    return file.getvalue()


def tone(pitches: list[float], seconds: float) -> np.ndarray:
    time = np.arange(int(seconds * RATE)) / RATE
    return np.concatenate([0.3 * np.sin(2 * np.pi * pitch * time) for pitch in pitches]).astype(np.float32)


@pytest.mark.parametrize(
    ("kind", "norm", "pads"),
    [("wav2vec2", "layer", True), ("wav2vec2", "group", False), ("wavlm", "layer", True), ("sew", "layer", False)],
)
@pytest.mark.parametrize("head", ["text", "class"])
@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")  # of WavLM in transformers
def test_answers_are_those_of_the_pipeline_in_batches_of_any_lengths(tmp_path, kind, norm, pads, head):
    """SEW gives other answers beside longer recordings in spite of its mask, so that it gets batches of one length."""
    folder = models.save_wav2vec2(tmp_path, kind, norm=norm, pitches=tuple(PITCHES) if head == "class" else ())
    checkpoint = load_source(folder)
    task = checkpoint.task
    rng = np.random.default_rng(0)
    waveforms = [make_tone(rng, length, RATE) for length in LENGTHS]
    samples = [task.parse(encode(waveform)) for waveform in waveforms]
    assert bool(task.padding) is pads
    answers = []
    for batch in [samples] if pads else [[sample] for sample in samples]:
        with torch.no_grad():
            inputs = {name: torch.from_numpy(array) for name, array in task.encode(batch).items()}
            answers += task.decode({"logits": checkpoint.module(**inputs).numpy()}, batch)
    pipeline = transformers.pipeline(task.name, str(folder), feature_extractor=str(folder), device="cpu")
    for answer, waveform in zip(answers, waveforms, strict=True):
        expected = pipeline(waveform.copy())
        if head == "text":
            assert answer == expected
            continue
        assert [each["label"] for each in answer["scores"]] == [each["label"] for each in expected]
        for ours, theirs in zip(answer["scores"], expected, strict=True):
            assert ours["score"] == pytest.approx(theirs["score"], abs=1e-5)


def test_frames_are_masked_as_by_transformers_in_whole_numbers(tmp_path):
    settings = {"add_adapter": True, "num_adapter_layers": 2, "adapter_stride": 3, "hidden_size": 32}
    config = transformers.Wav2Vec2Config(**settings, num_attention_heads=2, num_hidden_layers=1)
    own = transformers.Wav2Vec2Model(config)
    encoder, adapter = split_convolutions(config)
    lengths = torch.tensor([400, 719, 720, 5000, 16_000])
    mask = (torch.arange(16_000) < lengths[:, None]).long()
    for adapted, frames in ((False, 49), (True, 6)):
        wanted = own._get_feature_vector_attention_mask(frames, mask, add_adapter=adapted)
        assert torch.equal(mask_frames(encoder, adapter, frames, mask, adapted), wanted)


@pytest.mark.parametrize(("kind", "subtype"), [("WAV", "PCM_16"), ("FLAC", "PCM_16"), ("OGG", "VORBIS"), ("MP3", None)])
@pytest.mark.parametrize("rate", [8000, 44_100])
def test_files_of_any_format_rate_and_number_of_channels_become_one_waveform(kind, subtype, rate):
    time = np.arange(rate) / rate
    stereo = np.stack([0.8 * np.sin(2 * np.pi * 440 * time), np.zeros(rate)], axis=1)
    made = AudioPreprocess(sampling_rate=RATE).apply(*read_audio(encode(stereo, rate, kind, subtype)))
    assert made.dtype == np.float32
    assert len(made) == pytest.approx(RATE, rel=0.1)  # MP3 adds silence at both ends
    spectrum = np.abs(np.fft.rfft(made[: RATE // 2]))
    assert spectrum.argmax() * 2 == pytest.approx(440, abs=4)
    assert np.abs(made[2000:8000]).max() == pytest.approx(0.4, rel=0.1)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (b"RIFF, but no more", "is not an audio file"),
        (b"", "is not an audio file"),
        (lambda: encode(np.zeros(RATE * 61), subtype="PCM_16"), "61.0 s long, and at most 60 s"),
        (lambda: encode(np.zeros((3_100_000, 8), np.int16), 192_000, "FLAC", "PCM_16"), "in 8 channels, more than"),
        (lambda: encode(np.zeros(100)), "0.006 s long"),
        (lambda: encode(np.full(RATE, np.nan)), "NaN or infinity"),
        ("?", "base64"),
        ({"array": [0.0] * 9000}, "'array': .* 'sampling_rate'"),
        ({"array": [0.0] * 9000, "sampling_rate": 1}, "expected 1,000 to 768,000"),
        ({"array": [[0.0] * 9000], "sampling_rate": RATE}, "one axis"),
        ({"array": ["loud"], "sampling_rate": RATE}, "holds text"),
        ([[0.0] * 9000], "one axis"),
        (None, "a waveform"),
    ],
)
def test_what_is_no_recording_is_refused_in_one_sentence(speech, value, told):
    with pytest.raises(InputError, match=told):
        load_source(speech).task.parse(value() if callable(value) else value)


def test_a_waveform_with_its_rate_is_the_recording_of_a_file_with_the_longest_as_a_bound(speech):
    task = load_source(speech).task
    waveform = make_tone(np.random.default_rng(0), 12_000, 8000)
    given_so = task.parse({"array": waveform.tolist(), "sampling_rate": 8000})
    np.testing.assert_array_equal(given_so, task.parse(encode(waveform, 8000)))
    np.testing.assert_array_equal(given_so, task.parse(given_so))
    assert given_so.std() == pytest.approx(1, abs=1e-3)
    (waveform, mask) = load_source(speech).task.inputs
    assert waveform.bounds == mask.bounds
    assert waveform.bounds["samples"][1] == MAX_SECONDS * RATE


@given(st.lists(st.integers(0, len(models.LETTERS) - 1), max_size=60), st.booleans())
def test_characters_are_grouped_as_by_the_tokenizer(tmp_path_factory, ids, upper):
    path = tmp_path_factory.getbasetemp() / "vocab.json"
    path.write_text(json.dumps({token: index for index, token in enumerate(models.LETTERS)}))
    own = transformers.Wav2Vec2CTCTokenizer(str(path), do_lower_case=upper, bos_token=None, eos_token=None)
    made = CtcVocabulary(tokens=models.LETTERS, blank=0, delimiter="|", upper=upper, unknown=1)
    assert made.decode(ids) == own.decode(ids)
    text = made.decode(ids).replace("<unk>", "")
    if "  " not in text:
        assert made.encode(text) == own(text)["input_ids"]


def test_word_accuracy_is_over_all_recordings_and_a_character_that_cannot_be_written_is_named(speech):
    with pytest.raises(DataError, match="no token for 'X'"):
        CtcVocabulary(tokens=("<pad>", "A"), blank=0, delimiter="|").encode("AXA")
    task = load_source(speech).task
    logits = np.full((2, 4, len(models.LETTERS)), -9.0, np.float32)
    for row, text in enumerate(("TEA|", "EAT")):
        for frame, letter in enumerate(text):
            logits[row, frame, models.LETTERS.index(letter)] = 9
    logits[1, 3] = 0  # padding
    assert [answer["text"] for answer in task.decode({"logits": logits}, [None, None])] == ["TEA", "EAT"]
    score = task.scorer({"logits": logits}, ["TEA", "EAT I ATE"])
    assert score(np.array([0])) == 1
    assert score(np.array([0, 1])) == pytest.approx(1 - 2 / 4)


def test_the_loss_and_its_gradient_are_those_of_torch():
    torch.manual_seed(0)
    logits = torch.randn(20, 3, 8, requires_grad=True)
    targets, frames, lengths = torch.randint(1, 8, (3, 5)), torch.tensor([20, 15, 3]), torch.tensor([5, 2, 5])
    scores = logits.log_softmax(-1)
    wanted = torch.nn.functional.ctc_loss(scores, targets, frames, lengths, reduction="none", zero_infinity=True)
    found, _ = align(scores, targets, frames, lengths, 0)
    torch.testing.assert_close(found, wanted)
    assert found[2] == 0  # five characters do not fit into three frames
    weights = torch.tensor([1.0, 2.0, 3.0])
    gradients = [torch.autograd.grad(loss @ weights, logits, retain_graph=True)[0] for loss in (found, wanted)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    ("found", "wanted", "edits"),
    [("", "", 0), ("a b c", "a b c", 0), ("", "a b", 2), ("a x c", "a b c", 1), ("b c d", "a b c", 2), ("a", "b c", 2)],
)
def test_word_edits_are_counted(found, wanted, edits):
    assert count_edits(found.split(), wanted.split()) == count_edits(wanted.split(), found.split()) == edits


def test_a_folder_of_recordings_in_classes_is_learnt_compressed_and_served(tmp_path, cache):
    folder = models.save_wav2vec2(tmp_path / "model", pitches=tuple(PITCHES), layers=1)
    rng = np.random.default_rng(0)
    for name, pitch in PITCHES.items():
        (tmp_path / "data" / name).mkdir(parents=True)
        for number in range(40):
            waveform = tone([pitch * rng.uniform(0.8, 1.2)], rng.uniform(0.2, 0.4))
            # A file of floats holds the time at which it was written, and the split is by what a file holds.
            (tmp_path / "data" / name / f"{number}.wav").write_bytes(encode(waveform, subtype="PCM_16"))
    tuned = tune(folder, tmp_path / "data", tmp_path / "tuned", cache, batch_size=12, steps=40)
    assert tuned.after["accuracy"] > 0.9
    recipe = Recipe(source=str(tmp_path / "tuned"), data=str(tmp_path / "data"), engine_only="onnxruntime")
    artifact = compress(recipe, tmp_path / "pitch.laconic", steps=QUIET, cache=cache).artifact
    assert artifact.manifest.verdict.failures == []
    path = "/v1/models/pitch/predict"
    with running(artifact.path) as server, server.client() as client:
        lengths = dict(zip(PITCHES, (0.25, 0.3, 0.35), strict=True))  # within those of training
        sounds = {name: encode(tone([pitch], lengths[name])) for name, pitch in PITCHES.items()}
        answers = client.post(path, files=[("audio", (name, sound)) for name, sound in sounds.items()]).json()
        assert [answer["label"] for answer in answers["answers"]] == list(PITCHES), answers
        alone = client.post(path, content=sounds["low"], headers={"content-type": "audio/wav"}).json()["answers"][0]
        assert alone["score"] == pytest.approx(answers["answers"][0]["score"], abs=1e-3)
        assert client.post(path, content=b"noise", headers={"content-type": "audio/wav"}).status_code == 400


def write_speech(folder: Path, count: int) -> Path:
    rng, lines = np.random.default_rng(0), []
    pitches = dict(zip("ETAOI ", (300, 600, 1200, 2400, 4800, 1), strict=True))
    for number in range(count):
        text = " ".join("".join(rng.choice(list("ETAOI"), 2)) for _ in range(2))
        (folder / f"{number}.wav").write_bytes(encode(tone([pitches[letter] for letter in text], 0.08)))
        lines.append(json.dumps({"audio": f"{number}.wav", "text": text}))
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return folder / "rows.jsonl"


@pytest.mark.parametrize("length", [4000, 4321])
def test_a_recording_that_is_padded_to_share_a_batch_gets_its_own_frames(speech, length):
    checkpoint = load_source(speech)
    task = checkpoint.task
    layout = Layout(checkpoint.inputs, checkpoint.outputs, task.padding, rounded=True, derive=task.derive_sizes)
    short, long = (layout.make_part(task.encode([tone([300], size / RATE)])) for size in (length, 6000))
    assert layout.sizes([short, long])["samples"] > 6000
    with TorchSession(checkpoint.module, checkpoint.inputs, checkpoint.outputs) as session:
        (alone,) = session.run(short.inputs).values()
        (beside,) = layout.split_outputs(session.run(layout.join_inputs([short, long])), [short, long])[0].values()
    np.testing.assert_allclose(beside, alone, atol=1e-4)


def test_what_is_said_is_learnt_from_texts(speech, tmp_path, cache):
    rows = write_speech(tmp_path, 40)
    tuned = tune(speech, rows, tmp_path / "tuned", cache, lr=0.005, batch_size=10, steps=40)
    assert tuned.after["loss"] < min(tuned.before["loss"] / 2, 2)
    task = load_source(tmp_path / "tuned").task
    dataset = read(rows, task)
    assert dataset.labels is not None
    assert set("".join(dataset.labels)) == set("ETAOI ")
    with pytest.raises(DataError, match="must be the text"):
        task.parse_label(3, None)


def test_features_that_are_not_understood_are_refused_when_the_model_is_opened(speech, tmp_path):
    for file in speech.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = {"feature_extractor_type": "WhisperFeatureExtractor", "sampling_rate": RATE}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(SourceError, match="WhisperFeatureExtractor, whose rules Laconic does not know"):
        load_source(tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(SourceError, match=r"preprocessor_config\.json"):
        load_source(tmp_path)
