"""Whisper: recordings are read as by transformers, and written down as by transformers, up to the HTTP answer."""

import base64
import io
import json
import shutil
from dataclasses import replace

import models
import numpy as np
import pytest
import soundfile
import torch
import transformers
from contexts import tune
from hypothesis import given, settings
from hypothesis import strategies as st
from served import running
from test_fleet import RATES
from test_text2text_generation import write_together

from compress.pipeline import compress
from laconic.artifacts.manifest import MODEL
from laconic.cache import Cache
from laconic.config import NamedSettings
from laconic.data.reader import read
from laconic.errors import CorruptArtifact, DataError, InputError, RecipeError, SourceError
from laconic.models.source_loading import load_source
from laconic.progress import Steps
from laconic.recipes.recipe import Recipe
from laconic.runtimes.generator import EncoderInputs, GenerationRequest, Sampling
from laconic.runtimes.model_session import open_model
from laconic.runtimes.openvino_decoder import OpenVinoDecoder
from laconic.runtimes.runtime import make_runtime
from laconic.tasks.audio import make_tone
from laconic.tasks.audio_preprocess import LogMelPreprocess
from laconic.tasks.generation_settings import GenerationSettings
from laconic.tasks.task import open_task
from laconic.tasks.timed_settings import TimedSettings
from train.planner.memory_plan import PredictionJob
from train.planner.meta_model import open_meta_model
from train.settings import Training

QUIET = Steps(quiet=True)
RATE = 16_000
SETTINGS = {
    "detected": {},
    "named": {"language": "french", "task": "transcribe"},
    "translated": {"task": "translate"},
    "language alone": {"language": "<|en|>"},
    "short": {"max_new_tokens": 3},
    "long": {"max_length": 100},
    "penalty": {"language": "fr", "repetition_penalty": 1.7, "no_repeat_ngram_size": 2},
    "older": {"forced_decoder_ids": [[1, None], [2, 261]]},
    "older, named": {"forced_decoder_ids": [[1, 259], [2, 260], [3, 263]]},
    "older, overruled": {"forced_decoder_ids": [[1, 259], [2, 260]], "language": "en"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return models.save_whisper(tmp_path_factory.mktemp("speech") / "whisper")


@pytest.fixture(scope="module")
def plain(folder):
    """Random weights in FP32, without samples: those of the original's answers."""
    recipe = Recipe.parse({"source": str(folder), "stages": [], "engine_only": "onnxruntime"})
    return compress(recipe, folder.parent / "plain.laconic", steps=QUIET, cache=Cache(folder.parent / "cache")).artifact


@pytest.fixture(scope="module")
def parts(plain):
    """The path of the captured decoder, with the encoder beside it."""
    return plain.path / MODEL


def encode(waveform, rate=RATE, kind="WAV"):
    """The bytes of a file."""
    file = io.BytesIO()
    soundfile.write(file, waveform, rate, format=kind, subtype="PCM_16")
    return file.getvalue()


def make_tones(count=6):
    rng = np.random.default_rng(0)
    return [make_tone(rng, int(length), RATE) for length in rng.integers(2000, RATE, count)]


def write_by_transformers(folder, waveforms):
    """The tokens and the texts that transformers writes greedily, from the recordings on."""
    model = transformers.WhisperForConditionalGeneration.from_pretrained(folder).eval()
    processor = transformers.WhisperProcessor.from_pretrained(folder)
    features = processor(waveforms, sampling_rate=RATE, return_tensors="pt").input_features
    tokens = model.generate(features, num_beams=1, do_sample=False)
    return tokens.tolist(), processor.batch_decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("bands", [80, 128])
@pytest.mark.parametrize("length", [400, 40_000, 479_900, 480_000])
def test_features_are_those_of_transformers(bands, length):
    own = transformers.WhisperFeatureExtractor(feature_size=bands)
    waveform = make_tone(np.random.default_rng(length), length, RATE)
    found = LogMelPreprocess(feature_size=bands).apply(waveform, RATE)
    assert found.dtype == np.float32
    padded = np.pad(waveform, (0, 480_000 - length))[None]
    np.testing.assert_allclose(found, own._np_extract_fbank_features(padded, "cpu")[0], atol=1e-6)
    (wanted,) = own(waveform, sampling_rate=RATE, return_tensors="np").input_features  # by the FFT of torch in FP32
    np.testing.assert_allclose(found, wanted, atol=5e-5)


def test_spectrograms_of_whole_recordings_are_those_of_transformers():
    own = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    waveform = np.concatenate(make_tones())
    found = LogMelPreprocess(feature_size=16, chunk_length=1).apply_whole(waveform, RATE)
    (wanted,) = own(waveform, sampling_rate=RATE, return_tensors="np", truncation=False, padding="longest").values()
    assert found.shape[1] > 200
    np.testing.assert_allclose(found, wanted[0], atol=5e-5)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 99), max_size=6), st.floats(-3, 3), st.integers(0, 99))
def test_timestamps_follow_the_rules_of_transformers(text, lead, seed):
    plain = {"no_timestamps_token_id": 79, "eos_token_id": 60, "max_initial_timestamp_index": 5}
    rules = transformers.WhisperTimeStampLogitsProcessor(transformers.GenerationConfig(**plain), begin_index=2)
    times = {"first": 80, "latest_start": 5, "max_new_tokens": 20}
    untimed = GenerationSettings(
        decoder_start_token_id=70, eos_token_id=(60,), forced_decoder_ids=(71, 79), timestamps=times
    )
    logits = np.random.default_rng(seed).standard_normal((1, 100)).astype(np.float32)
    logits[:, 80:] += lead
    written = np.array([[70, 71, *text]])
    timed = TimedSettings.add_to(untimed)
    assert timed.forced_decoder_ids == (71,)
    wanted = rules(torch.from_numpy(written), torch.from_numpy(logits))
    np.testing.assert_array_equal(timed.restrict(logits, written), wanted.numpy())


def test_silence_and_other_sizes_of_windows_are_those_of_transformers():
    settings = {"feature_size": 20, "n_fft": 512, "hop_length": 200, "chunk_length": 2, "sampling_rate": 24_000}
    own, made = transformers.WhisperFeatureExtractor(**settings), LogMelPreprocess(**settings)
    for waveform in (np.zeros(9000, np.float32), make_tones(1)[0]):
        (wanted,) = own(waveform, sampling_rate=24_000, return_tensors="np").input_features
        np.testing.assert_allclose(made.apply(waveform, 24_000), wanted, atol=1e-5)


@pytest.mark.parametrize("changes", SETTINGS.values(), ids=SETTINGS)
def test_what_is_written_is_what_transformers_writes(folder, parts, tmp_path, changes):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    settings = json.loads((folder / "generation_config.json").read_text()) | changes
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    waveforms = make_tones()
    wanted, texts = write_by_transformers(tmp_path, waveforms)
    task = load_source(tmp_path).task
    samples = [task.parse(encode(waveform)) for waveform in waveforms]
    exact = task.encode([task.parse({"array": waveform, "sampling_rate": RATE}) for waveform in waveforms])
    with open_model(parts, make_runtime("onnxruntime").open, task.generation) as session:
        found = session.run({"input_features": exact["input_features"]})["sequences"]
    begin = task.generation.begin
    text = [row[: len(wanted[0])] for row in found[:, begin:].tolist()]
    assert text == wanted
    assert len({tuple(row) for row in wanted}) > 1
    assert [each["text"] for each in task.decode({"sequences": found}, samples)] == [each.strip() for each in texts]


@pytest.mark.parametrize("changes", [{}, {"languages": (), "forced_decoder_ids": (258, 260, 263)}])
def test_recordings_that_come_and_go_are_written_down_as_together(folder, parts, changes):
    task = load_source(folder).task
    generation = task.generation.model_copy(update=changes | {"no_repeat_ngram_size": 3})
    source = {"input_features": task.encode(task.examples(8))["input_features"]}
    with open_model(parts, make_runtime("onnxruntime").open, generation) as session:
        expected = session.run(source)["sequences"].tolist()
    assert len({tuple(row) for row in expected}) > 3
    sources = [{"input_features": features[None]} for features in source["input_features"]]
    texts = write_together(parts, sources, generation, 0, 3)
    for (number, _), text in texts.items():
        assert text == expected[number][: len(text)]
        assert len(text) == generation.max_new_tokens or text[-1] in generation.eos_token_id


def test_timestamps_are_refused_of_a_model_without_their_tokens(folder, parts):
    task = load_source(folder).task
    assert task.generation.timestamps is None
    options = {"context": task.generation.max_new_tokens, "cache_bytes": 4 << 20, "generation": task.generation}
    with OpenVinoDecoder(parts, **options) as generator:
        source = EncoderInputs(task.encode_request(task.examples(1)[0]), generator.source_tokens)
        with pytest.raises(InputError, match="no tokens for timestamps"):
            generator.add(GenerationRequest(0, (), Sampling(5, timestamps=True), source))


def test_openvino_writes_the_same_as_onnxruntime(folder, parts):
    task = load_source(folder).task
    source = task.encode(task.examples(3))
    source = {"input_features": source["input_features"]}
    with open_model(parts, make_runtime("onnxruntime").open, task.generation) as session:
        wanted = session.run(source)["sequences"]
    with open_model(parts, make_runtime("openvino").open, task.generation) as session:
        np.testing.assert_array_equal(session.run(source)["sequences"], wanted)


def test_a_model_for_english_has_no_language(tmp_path):
    folder = models.save_whisper(tmp_path / "english", whole=False)
    generation = load_source(folder).task.generation
    assert (generation.languages, generation.forced_decoder_ids, generation.begin) == ((), (263,), 1)


def write_speech(folder, count):
    """Files of two tones, and the letters that stand for them."""
    rng, lines = np.random.default_rng(0), []
    pitches = {"a": 300, "b": 900, "c": 2700}
    time = np.arange(RATE // 4) / RATE
    for number in range(count):
        letters = rng.choice(list(pitches), 2)
        waveform = np.concatenate([0.3 * np.sin(2 * np.pi * pitches[each] * time) for each in letters])
        noise = 0.01 * rng.standard_normal(len(waveform))
        (folder / f"{number}.wav").write_bytes(encode(waveform + noise))
        lines.append(json.dumps({"audio": f"{number}.wav", "text": " ".join(letters), "language": "en"}))
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return folder / "rows.jsonl"


def test_fine_tuning_teaches_what_is_said(tmp_path):
    source = models.save_whisper(tmp_path / "source", language="en", task="transcribe", max_new_tokens=8)
    rows = write_speech(tmp_path, 60)
    cache = Cache(tmp_path / "cache")
    tuned = tune(source, rows, tmp_path / "tuned", cache, lr=0.01, batch_size=16, steps=60, generate=2)
    assert tuned.after["loss"] < tuned.before["loss"] / 3
    told = json.loads((tmp_path / "tuned" / "training" / "answers.jsonl").read_text().splitlines()[-1])
    assert told["given"].endswith(".wav")
    checkpoint = load_source(tmp_path / "tuned")
    assert checkpoint.task.generation == load_source(source).task.generation
    samples = read(rows, checkpoint.task).samples[:8]
    features = torch.from_numpy(checkpoint.task.encode(samples)["input_features"])
    written = checkpoint.module.generate({"input_features": features}, checkpoint.task.generation).numpy()
    answers = [answer["text"] for answer in checkpoint.task.decode({"sequences": written}, samples)]
    wanted = [json.loads(line)["text"] for line in rows.read_text().splitlines()[:8]]
    assert np.mean([one == other for one, other in zip(answers, wanted, strict=True)]) > 0.8


def test_memory_is_planned_from_the_config_alone(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"decoder_layers": 2}))
    model = open_meta_model(tmp_path)
    assert (model.task.inputs[0].shape, model.longest) == (("batch", 16, 100), 40)
    plain = Training.model_validate({"batch_size": 2, "optimizer": "sgd"})
    job = PredictionJob(model, 8, RATES, 1, plain)
    assert job.predict(plain).peak > 0
    layerwise = plain.model_copy(update={"techniques": (NamedSettings(name="layerwise"),)})
    assert job.predict(layerwise) is None  # each layer of the decoder reads the encoder too
    with pytest.raises(RecipeError, match="WhisperDecoderLayer take a tensor beside"):
        replace(job, plain=layerwise).predict(layerwise)


def test_an_artifact_in_int8_is_proven_on_what_is_said(folder):
    cache = Cache(folder.parent / "cache")
    recipe = Recipe.parse(
        {
            "source": str(folder),
            "data": {"calibrate": str(write_speech(folder.parent, 60))},
            "stages": ["quantize.static"],
            "engine_only": "onnxruntime",
            "goal": {"fidelity": 0.7},
        }
    )
    made = compress(recipe, folder.parent / "small.laconic", steps=QUIET, cache=cache).artifact
    (drift,) = made.manifest.verdict.drift
    assert made.manifest.verdict.failures == []
    assert {"metric", "metric_original"} <= set(drift.figures)
    assert "agreement" in {name for each in made.manifest.verdict.information for name in each.figures}
    assert "int8" in made.manifest.precision.values()
    assert {"model.onnx", "model.encoder.onnx", "generation.json", "preprocess.json"} <= set(made.manifest.files)


def test_a_server_answers_as_transformers(folder, plain):
    assert plain.manifest.verdict.failures == []
    files = [encode(waveform) for waveform in make_tones()]
    _, texts = write_by_transformers(folder, [soundfile.read(io.BytesIO(file), dtype="float32")[0] for file in files])
    wanted = [{"text": text.strip()} for text in texts]
    path = "/v1/models/plain/predict"
    with running(plain.path) as server, server.client() as client:
        given = [base64.b64encode(file).decode() for file in files]
        assert client.post(path, json={"audio": given}).json()["answers"] == wanted
        parts = [("audio", (f"{number}.wav", file)) for number, file in enumerate(files)]
        assert client.post(path, files=parts).json()["answers"] == wanted
        alone = client.post(path, content=files[0], headers={"content-type": "audio/wav"})
        assert alone.json()["answers"] == wanted[:1]
        described = client.get("/v2/models/plain").json()
        assert [each["name"] for each in described["inputs"]] == ["input_features"]
        assert [each["name"] for each in described["outputs"]] == ["sequences"]
        for wrong in (5, "?", [[0.0]], {"array": [0.0] * 17_000, "sampling_rate": RATE}):
            refused = client.post(path, json={"audio": wrong})
            assert refused.status_code == 400, wrong
        assert client.get("/openapi.json").status_code == 200


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (b"RIFF, but no more", "is not an audio file"),
        (encode(np.zeros(0)), "0.000 s long, expected at least 0.025 s"),
        (encode(np.zeros(RATE + 1)), "1.0 s long, and at most 1 s are taken. Cut it into parts"),
        ("?", "base64"),
        ({"array": [0.0] * 9000, "sampling_rate": 1}, "expected 1,000 to 768,000"),
        ({"array": [float("nan")] * 9000, "sampling_rate": RATE}, "NaN or infinity"),
        ([[0.0] * 100], r"the shape \[16, 100\], not \[1, 100\]"),
        (None, "a spectrogram"),
    ],
)
def test_what_is_no_recording_is_refused_in_one_sentence(folder, value, told):
    with pytest.raises(InputError, match=told):
        load_source(folder).task.parse(value)


def test_recordings_are_resampled_and_word_accuracy_is_that_of_the_likeliest_tokens(folder):
    task = load_source(folder).task
    waveform = make_tone(np.random.default_rng(0), 8000, 8000)
    assert task.parse(encode(waveform, 8000)).shape == (16, 100)
    found = task.parse({"array": waveform.tolist(), "sampling_rate": 8000})
    np.testing.assert_allclose(task.parse(encode(waveform, 8000)), found, atol=1e-2)
    np.testing.assert_array_equal(task.parse(found), found)
    task = load_source(folder).task
    labels = [list(task.encode_text(text, prefix=(258, 263))) for text in ("a b", "a b c")]
    tokens = np.zeros((2, max(map(len, labels))), np.int64)
    for row, label in zip(tokens, labels, strict=True):
        row[: len(label)] = label
    tokens[0, 0] = tokens[1, 1] = 5  # language and forced tokens are no words
    tokens[1, 4] = task.tokenizer.token_to_id("x")
    score = task.scorer({"tokens": tokens}, labels)
    assert score(np.array([0])) == 1
    assert score(np.array([0, 1])) == pytest.approx(1 - 1 / 5)


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("preprocessor_config.json", {"feature_size": 17}, "makes 17 bands and 100 frames .* reads 16 and 100"),
        ("preprocessor_config.json", {"chunk_length": 2}, "16 bands and 200 frames"),
        ("preprocessor_config.json", {"hop_length": 0}, "transformers does not read"),
        ("preprocessor_config.json", {"chunk_length": 90}, "sets chunk_length to 90: input should be less than"),
        ("preprocessor_config.json", {"dither": 0.1}, "values differ by up to"),
        ("preprocessor_config.json", {"feature_extractor_type": "Wav2Vec2FeatureExtractor"}, "the input differs"),
        ("preprocessor_config.json", None, r"preprocessor_config\.json"),
        ("tokenizer.json", None, r"has no tokenizer\.json, which makes a text"),
        ("generation_config.json", {"language": "latin"}, r"'latin', which is none .*: <\|en\|>, <\|fr\|>"),
        ("generation_config.json", {"task": "sing"}, "the task 'sing', expected one of transcribe, translate"),
        ("generation_config.json", {"forced_decoder_ids": [[2, 5]]}, r"for the places \[2\], expected those from 1"),
        ("generation_config.json", {"bad_words_ids": [[5]]}, "sets bad_words_ids, which"),
        ("generation_config.json", {"suppress_tokens": [9999]}, "name the token 9999, and the model has 267"),
    ],
)
def test_what_is_broken_is_told_when_the_model_is_opened(folder, tmp_path, name, changes, told):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    if changes is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))
    with pytest.raises((SourceError, InputError), match=told):
        load_source(tmp_path)


def test_texts_of_a_model_that_hears_the_language_come_with_theirs(folder, tmp_path):
    task = load_source(folder).task
    (tmp_path / "a.wav").write_bytes(encode(make_tones(1)[0]))
    row = {"audio": "a.wav", "text": "ab"}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row | {"language": "fr"}))
    rows = read(path, task)
    assert rows.labels == [[259, 263, *task.tokenizer.encode("ab", add_special_tokens=False).ids, 256]]
    batch = task.encode(rows.samples)
    assert batch["decoder_input_ids"].tolist() == [[257, *rows.labels[0][:-1]]]
    assert batch["decoder_attention_mask"].tolist() == [[1, 0, 1, 1, 1]]
    for language, told in ((None, "is not given"), ("xx", "'xx', which the model does not know")):
        path.write_text(json.dumps(row | {"language": language}))
        with pytest.raises(DataError, match=told):
            read(path, task)


def test_the_files_of_another_model_are_refused(plain, tmp_path):
    for file in ("tokenizer.json", "preprocess.json", "generation.json"):
        shutil.copy(plain.path / file, tmp_path)
    settings = json.loads((tmp_path / "preprocess.json").read_text())
    for changes in ({"feature_size": 20}, {"chunk_length": 10**9}, {"code": "x"}):
        (tmp_path / "preprocess.json").write_text(json.dumps(settings | changes))
        with pytest.raises(CorruptArtifact):
            open_task("speech-to-text", tmp_path, plain.manifest.inputs)
