"""Encoder-decoders: with a cache they write what transformers writes, token for token, up to the HTTP answer."""

import json
import shutil
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import models
import numpy as np
import pytest
import torch
import transformers
from contexts import tune
from served import running

from compress.pipeline import compress
from compress.quantize.calibration import observe_activations
from compress.quantize.ranges import minmax
from export.candidates.engine_option import EngineOption
from export.parity.follower import make_parity_ledger
from export.placements.split_decoder import split_decoder
from export.reference_texts import write_reference_texts
from export.sources import capture_graph
from laconic.artifacts.artifact import Artifact
from laconic.artifacts.manifest import MANIFEST, MODEL
from laconic.cache import Cache
from laconic.data.reader import read
from laconic.errors import (
    ArtifactError,
    CorruptArtifact,
    DataError,
    InputError,
    RuntimeFailure,
    SourceError,
    UsageError,
)
from laconic.hashing import seal, unseal
from laconic.models.encoder_decoder import EncoderDecoder
from laconic.models.source import CheckpointSource
from laconic.models.source_loading import load_source
from laconic.progress import Steps
from laconic.quantization.plan import Plan, Smoothing
from laconic.recipes.recipe import Recipe
from laconic.recipes.splits import make_samples
from laconic.runtimes.decoder_file import encoder_of
from laconic.runtimes.generator import EncoderInputs, GenerationRequest, Sampling
from laconic.runtimes.model_session import open_model
from laconic.runtimes.onnxruntime import OnnxRuntime
from laconic.runtimes.openvino_decoder import OpenVinoDecoder
from laconic.runtimes.runtime import make_runtime
from laconic.runtimes.source_encoder import SourceEncoder
from laconic.tasks.decoder_tensors import GROUPS, group_probabilities
from laconic.tasks.task import open_task
from laconic.tasks.text2text_generation import TargetedText

QUIET = Steps(quiet=True)
FAMILIES = {"t5": models.save_t5, "bart": models.save_bart_writer}
SETTINGS = {
    "short": {"max_new_tokens": 5},
    "penalty": {"repetition_penalty": 1.7},
    "no repeats": {"no_repeat_ngram_size": 2},
    "at least": {"min_new_tokens": 12},
    "forced": {"forced_bos_token_id": 7, "forced_eos_token_id": (3,), "max_new_tokens": 9},
    "suppressed": {"suppress_tokens": (8, 30), "begin_suppress_tokens": (23, 15)},
    "forced, then suppressed": {"forced_bos_token_id": 7, "begin_suppress_tokens": (23, 8, 30)},
    "two ends": {"eos_token_id": (3, 8, 30)},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a saved model of each family, and a cache."""
    made = tmp_path_factory.mktemp("writers")
    for name, save in FAMILIES.items():
        save(made / name, max_length=24)
    return made


@pytest.fixture(scope="module", params=["t5", pytest.param("bart", marks=pytest.mark.sweep)])
def family(request, folder):
    """A checkpoint, its graph in one piece, and the path of its decoder, with the encoder beside it."""
    checkpoint = load_source(folder / request.param)
    graph = capture_graph(CheckpointSource.of(checkpoint), Cache(folder / "cache"))
    parts = folder / f"{request.param}-parts" / MODEL
    parts.parent.mkdir()
    shutil.copy(graph.path, parts)
    split_decoder(parts)
    with OnnxRuntime().open(graph.path) as whole:
        yield checkpoint, whole, parts


def encode(task, count=8):
    """Texts as a server encodes them."""
    encoded = task.encode(task.examples(count))
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}


def write_by_transformers(checkpoint, source, generation):
    """What transformers writes greedily, padded to the most tokens."""
    tensors = {name: torch.from_numpy(array) for name, array in source.items()}
    written = checkpoint.module.generate(tensors, generation).numpy()
    padded = np.full((len(written), generation.max_new_tokens), generation.pad_token_id)
    padded[:, : written.shape[1]] = written
    return padded


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_what_is_written_is_what_transformers_writes(family, engine):
    checkpoint, _, parts = family
    source = encode(checkpoint.task)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(str(parts.parent).removesuffix("-parts"))
    tensors = {name: torch.from_numpy(array) for name, array in source.items()}
    wanted = model.generate(**tensors, do_sample=False, num_beams=1)[:, 1:].numpy()
    with open_model(parts, make_runtime(engine).open, checkpoint.task.generation) as session:
        found = session.run(source)["sequences"]
    assert len({tuple(row) for row in wanted.tolist()}) > 1
    np.testing.assert_array_equal(found[:, : wanted.shape[1]], wanted)
    assert (found[:, wanted.shape[1] :] == 0).all()


@pytest.mark.parametrize("changes", SETTINGS.values(), ids=SETTINGS)
def test_settings_of_generation_do_what_those_of_transformers_do(family, changes):
    checkpoint, _, parts = family
    generation = checkpoint.task.generation.model_copy(update=changes)
    source = encode(checkpoint.task)
    with open_model(parts, OnnxRuntime().open, generation) as session:
        found = session.run(source)["sequences"]
    np.testing.assert_array_equal(found, write_by_transformers(checkpoint, source, generation))


def write_together(parts, sources, generation, longest, leaving):
    """The tokens of each request, which begin at random while others are written. leaving: one of which a choice is
    cancelled when it has three tokens."""
    rng = np.random.default_rng(0)
    texts, ends = {}, {}
    with OpenVinoDecoder(
        parts, context=generation.max_new_tokens, cache_bytes=4 << 20, generation=generation, longest=longest
    ) as generator:
        waiting = list(range(len(sources)))
        while waiting or not generator.is_idle:
            for number in waiting[: rng.integers(0, 3)]:
                source = EncoderInputs(
                    sources[number], generator.source_tokens or sources[number]["input_ids"].shape[1]
                )
                sampling = Sampling(
                    generation.max_new_tokens,
                    repetition_penalty=generation.repetition_penalty,
                    stop_token_ids=generation.eos_token_id,
                    n=1 + number % 2,
                )
                generator.add(GenerationRequest(number, (), sampling, source))
                waiting.remove(number)
            if len(texts.get((leaving, 0), ())) == 3:
                generator.cancel(leaving, 0)
            for event in generator.step():
                texts.setdefault((event.request_id, event.choice), []).extend(event.token_ids)
                ends[event.request_id, event.choice] = event.finish_reason
        assert generator.ledger.used == 0
    assert {number for number, _ in ends} == {*range(len(sources))}
    assert ends.pop((leaving, 0)) == "cancelled"
    assert len(texts.pop((leaving, 0))) == 3
    assert set(ends.values()) <= {"stop", "length"}
    return texts


@pytest.mark.parametrize("changes", ["penalty", "no repeats", "forced, then suppressed", "at least"])
def test_rows_that_come_and_go_write_what_transformers_writes(family, changes):
    checkpoint, _, parts = family
    generation = checkpoint.task.generation.model_copy(update=SETTINGS[changes] | {"no_repeat_ngram_size": 3})
    source = encode(checkpoint.task, 10)
    expected = write_by_transformers(checkpoint, source, generation).tolist()
    assert len({tuple(row) for row in expected}) > 1
    lengths = source["attention_mask"].sum(axis=1)
    assert len(set(lengths.tolist())) > 3
    sources = [
        {name: array[row : row + 1, :length] for name, array in source.items()} for row, length in enumerate(lengths)
    ]
    leaving = max(range(10), key=lambda number: len(checkpoint.task.cut(expected[number])))
    texts = write_together(parts, sources, generation, checkpoint.task.max_tokens, leaving)
    for (number, _), text in texts.items():
        assert text == [*expected[number][: len(text)]]
        assert len(text) == generation.max_new_tokens or text[-1] in generation.eos_token_id


def test_sources_that_do_not_fit_are_refused(family):
    checkpoint, _, parts = family
    generation, longest = checkpoint.task.generation, checkpoint.task.max_tokens
    options = {"context": generation.max_new_tokens, "cache_bytes": 2 << 20, "generation": generation}
    with OpenVinoDecoder(parts, **options, longest=longest) as generator:
        whole = {name: np.ones((1, longest), np.int64) for name in ("input_ids", "attention_mask")}
        generator.add(GenerationRequest(1, (), Sampling(2), EncoderInputs(whole, longest)))
        while not generator.is_idle:
            generator.step()
        long = {name: np.ones((1, longest + 1), np.int64) for name in whole}
        for source in (
            None,
            EncoderInputs({}, 1),
            EncoderInputs(long, 1),
            EncoderInputs(whole | {"input_ids": np.ones((1, 3))}, 3),
        ):
            with pytest.raises(InputError):
                generator.add(GenerationRequest(2, (5,), Sampling(2), source))
        with pytest.raises(InputError, match="exceed the cache"):
            generator.add(GenerationRequest(2, (), Sampling(20, n=100), EncoderInputs(whole, longest)))


def test_others_are_written_while_a_source_is_encoded(family, monkeypatch):
    checkpoint, _, parts = family
    generation, longest = checkpoint.task.generation, checkpoint.task.max_tokens
    options = {"context": generation.max_new_tokens, "cache_bytes": 2 << 20, "generation": generation}
    may_encode, encode, lengths = threading.Event(), SourceEncoder.encode, []

    def encode_when_allowed(self, source):
        lengths.append(source["input_ids"].shape[1])
        return may_encode.wait(10) and encode(self, source)

    monkeypatch.setattr(SourceEncoder, "encode", encode_when_allowed)
    texts = {1: [], 2: [], 3: []}
    may_encode.set()
    with OpenVinoDecoder(parts, **options, longest=longest) as generator:
        whole, other = (
            EncoderInputs({name: np.ones((1, size), np.int64) for name in ("input_ids", "attention_mask")}, size)
            for size in (5, 7)
        )

        def write(is_enough):
            while not is_enough():
                for event in generator.step():
                    texts[event.request_id] += event.token_ids

        generator.add(GenerationRequest(1, (), Sampling(9), whole))
        write(lambda: len(texts[1]) == 3)
        may_encode.clear()
        generator.add(GenerationRequest(2, (), Sampling(9), whole))
        generator.add(GenerationRequest(3, (), Sampling(9), other))
        write(lambda: len(texts[1]) == 9)
        assert not texts[2]
        generator.cancel(3)
        write(lambda: generator.ledger.used == 1)
        may_encode.set()
        write(lambda: generator.is_idle)
    assert texts[2] == texts[1]
    assert 7 not in lengths, "a source is encoded whose client has left"


def test_both_parts_answer_a_target_as_the_whole_graph_and_the_encoder_computes_all_of_the_source(family):
    checkpoint, whole, parts = family
    targets = checkpoint.task.sample_inputs({"batch": 3, "seq": 9, "target": 6, "past": 0})
    with open_model(parts, OnnxRuntime().open) as session:
        found, wanted = session.run(targets), whole.run(targets)
        np.testing.assert_allclose(found["probabilities"], wanted["probabilities"], atol=1e-6)
        np.testing.assert_array_equal(found["tokens"], wanted["tokens"])
        with pytest.raises(RuntimeFailure, match="nothing says how this model writes"):
            session.run(encode(checkpoint.task))
    _checkpoint, _, parts = family
    with open_model(parts, OnnxRuntime().open) as session:
        layers = [kernel.node for kernel in session.decoder.kernels()]
        cross = [kernel.node for kernel in session.encoder.kernels() if "decoder" in kernel.node]
    assert layers
    assert not any("encoder." in name for name in layers)
    assert len(cross) == 4  # keys and values of two layers' cross-attention


def test_a_decoder_without_its_encoder_is_refused(family, tmp_path):
    _, _, parts = family
    lone = tmp_path / MODEL
    lone.write_bytes(encoder_of(parts).read_bytes())
    encoder_of(lone).write_bytes(parts.read_bytes())
    with pytest.raises(RuntimeFailure, match="no decoder with a cache"):
        open_model(lone, OnnxRuntime().open)


def test_large_vocabularies_are_compared_in_groups():
    config = transformers.T5Config(vocab_size=2 * GROUPS + 100, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    model = transformers.T5ForConditionalGeneration(config).eval()
    ids = torch.tensor([[4, 5, 6]])
    found = EncoderDecoder(model)(ids, torch.ones_like(ids), ids, torch.tensor([[1, 1, 0]]), torch.zeros(1, 2, 2, 0, 8))
    logits = model(input_ids=ids, decoder_input_ids=ids).logits
    np.testing.assert_allclose(
        found["probabilities"][0, :2].detach(), group_probabilities(logits.detach().numpy())[0, :2], atol=1e-6
    )
    assert (found["probabilities"][0, 2] == 0).all()


@pytest.fixture(scope="module")
def artifact(folder):
    """T5 in INT8, from texts with targets."""
    source = folder / "t5"
    texts = load_source(source).task.examples(80)
    rows = [{"text": text, "target": " ".join(text.split()[:4])} for text in texts]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe = Recipe.parse(
        {
            "source": str(source),
            "data": {"calibrate": str(folder / "rows.jsonl")},
            "stages": ["quantize.static"],
            "engine_only": "onnxruntime",
            "goal": {"fidelity": 0.9},
        }
    )
    cache = Cache(folder / "cache")
    return compress(recipe, folder / "t5.laconic", steps=QUIET, cache=cache).artifact, texts


def test_an_artifact_in_int8_is_proven_on_targets_and_measured_while_it_writes(artifact):
    made, _texts = artifact
    (drift,) = made.manifest.verdict.drift
    assert made.manifest.verdict.failures == []
    assert drift.figures["fidelity"] > 0.9
    assert {"metric", "metric_original"} <= set(drift.figures)
    assert "agreement" in {name for each in made.manifest.verdict.information for name in each.figures}
    assert "int8" in made.manifest.precision.values()
    assert {"model.onnx", "model.encoder.onnx", "generation.json"} <= set(made.manifest.files)
    assert made.measured.knee >= 1
    with made.open() as session:
        source = encode(made.task())
        together = session.run(source)["sequences"]
        assert together.shape == (8, 23)


def test_a_server_answers_with_what_the_model_writes(artifact):
    made, texts = artifact
    task = made.task()
    with made.open() as session:
        alone = [session.run(task.encode_request(text))["sequences"] for text in texts[:12]]
    wanted = [task.decode({"sequences": each}, [text])[0] for each, text in zip(alone, texts, strict=False)]
    with running(made.path) as server, server.client() as client:
        answer = client.post("/v1/models/t5/predict", json={"text": texts[:12]})
        assert answer.status_code == 200
        # In a batch sums are rounded otherwise, so that a near tie may go the other way.
        assert np.mean([one == other for one, other in zip(answer.json()["answers"], wanted, strict=True)]) > 0.8
        lone = client.post("/v1/models/t5/predict", json={"text": texts[0]}).json()
        assert lone["answers"] == wanted[:1]
        described = client.get("/v2/models/t5").json()
        assert [each["name"] for each in described["inputs"]] == ["input_ids", "attention_mask"]
        assert [each["name"] for each in described["outputs"]] == ["sequences"]
        for wrong in (5, ["a", 5], [["a", "b"]], {"text": "a"}):
            refused = client.post("/v1/models/t5/predict", json={"text": wrong})
            assert refused.status_code == 400, wrong
        assert client.get("/openapi.json").status_code == 200


@pytest.fixture(scope="module")
def plain(folder):
    """T5 in FP32, without samples."""
    recipe = Recipe.parse({"source": str(folder / "t5"), "stages": [], "engine_only": "onnxruntime"})
    return compress(recipe, folder / "plain.laconic", steps=QUIET, cache=Cache(folder / "cache")).artifact


def test_texts_stream_in_openais_api_and_are_those_of_predict(plain):
    task = plain.task()
    texts = task.examples(3)
    with running(plain.path) as server, server.client() as client:
        wanted = client.post("/v1/models/plain/predict", json={"text": texts}).json()["answers"]
        request = {"model": "plain", "prompt": texts, "temperature": 0}
        written = client.post("/v1/completions", json=request).json()
        expected = [each["text"].removesuffix("[SEP]").strip() for each in wanted]  # which is no special token here
        assert [each["text"].strip() for each in written["choices"]] == expected
        assert written["usage"]["prompt_tokens"] == sum(len(task.tokenizer.encode(text).ids) for text in texts)
        with client.stream("POST", "/v1/completions", json=request | {"stream": True, "prompt": texts[0]}) as stream:
            events = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
        assert events.pop() == "[DONE]"
        pieces = [json.loads(event)["choices"][0] for event in events]
        assert "".join(each["text"] for each in pieces) == written["choices"][0]["text"]
        assert pieces[-1]["finish_reason"] in ("stop", "length")
        asked = {"text_input": texts[0], "parameters": {"temperature": 0}}
        generated = client.post("/v2/models/plain/generate", json=asked).json()
        assert generated["text_output"] == written["choices"][0]["text"]
        for path, change, parameter in (
            ("completions", {"prompt": "a " * 600}, None),
            ("completions", {"max_tokens": 100}, None),
            ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "messages"),
        ):
            body = ({"model": "plain"} if "messages" in change else request) | change
            refused = client.post(f"/v1/{path}", json=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, parameter)
        writer = server.app.repository.get("plain").writer
        assert writer.worker.admission.ledger.used == 0


def test_requests_that_end_do_not_disturb_those_in_their_batch(artifact):
    made, texts = artifact
    with running(made.path) as server, server.client() as client:
        address = f"/v1/models/{made.name}/predict"
        wanted = [client.post(address, json={"text": text}).json()["answers"][0] for text in texts[:6]]
        gone = []
        for text in texts[:6]:  # clients that leave before they have an answer
            with socket.create_connection(("127.0.0.1", server.port)) as connection:
                body = json.dumps({"text": [text] * 8}).encode()
                head = f"POST {address} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                gone.append(body)
        with ThreadPoolExecutor(6) as pool:
            found = list(pool.map(lambda text: client.post(address, json={"text": text}).json(), texts[:6]))
        assert [each["answers"][0] for each in found] == wanted


def test_the_ledger_is_refused_for_models_of_two_graphs(artifact):
    made, _ = artifact
    with pytest.raises(UsageError, match="is an encoder and a decoder"):
        make_parity_ledger(made, made.path, made.choose(), None)


def test_a_missing_or_changed_encoder_is_told(artifact, tmp_path):
    made, _ = artifact
    copy = tmp_path / "copy.laconic"
    shutil.copytree(made.path, copy)
    encoder = copy / "model.encoder.onnx"
    encoder.write_bytes(encoder.read_bytes()[:-1] + b"?")
    with pytest.raises(ArtifactError, match=r"model\.encoder\.onnx"):
        Artifact.load(copy)
    encoder.unlink()
    with pytest.raises(ArtifactError, match=r"model\.encoder\.onnx"):
        Artifact.load(copy)
    manifest = unseal(copy / MANIFEST)
    del manifest["files"]["model.encoder.onnx"]
    (copy / MANIFEST).write_bytes(seal(manifest))
    with pytest.raises(ArtifactError, match=r"has no model\.encoder\.onnx"):
        Artifact.load(copy).open()


@pytest.mark.parametrize(
    "changes", [{"max_new_tokens": 10**6}, {"decoder_start_token_id": -1}, {"repetition_penalty": 0}, {"code": "x"}]
)
def test_settings_of_generation_out_of_bounds_are_refused(artifact, tmp_path, changes):
    made, _ = artifact
    for file in ("tokenizer.json", "preprocess.json", "generation.json"):
        shutil.copy(made.path / file, tmp_path)
    settings = json.loads((tmp_path / "generation.json").read_text()) | changes
    (tmp_path / "generation.json").write_text(json.dumps(settings))
    with pytest.raises(CorruptArtifact, match="does not hold the files of task"):
        open_task("text2text-generation", tmp_path, made.manifest.inputs)


def test_models_with_settings_or_caches_or_vocabularies_that_are_not_implemented_are_refused(tmp_path):
    source = models.save_t5(tmp_path / "t5", bad_words_ids=[[5]], encoder_no_repeat_ngram_size=3)
    with pytest.raises(SourceError, match="sets encoder_no_repeat_ngram_size, bad_words_ids, which"):
        load_source(source)
    config = transformers.SwitchTransformersConfig(
        vocab_size=40, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=4, num_experts=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    switch = models.save_transformer(
        tmp_path / "switch", transformers.SwitchTransformersForConditionalGeneration(config)
    )
    with pytest.raises(SourceError, match="does not run with a cache as T5 and BART do"):
        load_source(switch)
    marian = models.save_bart_writer(tmp_path / "marian")
    (marian / "tokenizer.json").unlink()
    (marian / "source.spm").touch()
    with pytest.raises(SourceError, match="a vocabulary for each of two languages"):
        load_source(marian)


def test_a_relu_without_a_bias_before_it_keeps_no_layer_from_int8_in_onnxruntime(captured, tmp_path):
    checkpoint, graph = captured("t5-encoder")
    statistics = observe_activations(
        graph, [checkpoint.task.encode([text]) for text in checkpoint.task.examples(4)], OnnxRuntime(), tmp_path
    )
    layers = [layer for layer in graph.layers if layer.kind == "MatMul"]
    ranges = {name: minmax(histogram) for name, histogram in statistics.histograms.items()}
    (first,) = (layer for layer in layers if layer.module.endswith("wo"))
    smoothing = {first.input: Smoothing(np.ones(64, np.float32), ranges[first.input])}
    precision = {layer.node: "int8" if layer in layers else "float32" for layer in graph.layers}
    option = EngineOption("onnxruntime", "float32")
    option.build(graph, Plan(precision, ranges, smoothing), tmp_path / MODEL)
    with option.open(tmp_path / MODEL, 1) as session:
        found = {kernel.node: kernel.precision for kernel in session.kernels()}
    assert {found[layer.node] for layer in layers} == {"int8"}


@pytest.mark.parametrize("engine", ["onnxruntime-cuda", "tensorrt"])
def test_engines_that_run_no_decoder_with_a_cache_are_refused_in_one_sentence(folder, tmp_path, engine):
    graph = capture_graph(CheckpointSource.of(load_source(folder / "t5")), Cache(folder / "cache"))
    with pytest.raises(
        RuntimeFailure, match=f"{engine} does not run models that write texts yet. Choose --target cpu, whose"
    ):
        EngineOption(engine, "float32").build(graph, Plan({}, {}), tmp_path / MODEL)


def test_beams_and_sampling_are_told_and_lengths_are_those_of_the_settings_or_a_default(tmp_path):
    generation = load_source(models.save_t5(tmp_path / "t5", num_beams=4)).task.generation
    assert "searches with 4 beams" in generation.describe_difference()
    assert "samples" in generation.model_copy(update={"do_sample": True}).describe_difference()
    assert generation.model_copy(update={"num_beams": 1}).describe_difference() is None
    assert load_source(models.save_t5(tmp_path / "a")).task.generation.max_new_tokens == 256
    assert load_source(models.save_t5(tmp_path / "b", max_length=30)).task.generation.max_new_tokens == 29
    assert load_source(models.save_t5(tmp_path / "c", max_new_tokens=30)).task.generation.max_new_tokens == 30
    assert load_source(models.save_bart_writer(tmp_path / "d")).task.generation.max_new_tokens == 64  # its positions


def test_samples_come_with_targets_or_without_and_begin_with_a_forced_token(tmp_path):
    task = load_source(models.save_bart_writer(tmp_path / "m")).task
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "hello world", "target": "a b"}\n{"text": "b", "label": "world"}')
    rows = read(path, task)
    assert [sample.target for sample in rows.samples] == [tuple(label) for label in rows.labels]
    assert task.tokenizer.decode(rows.labels[0]) == "[CLS] a b [SEP]"
    assert rows.labels[0][-1] == 3
    batch = task.encode(rows.samples)
    assert batch["decoder_input_ids"].tolist() == [[3, *rows.labels[0][:-1]], [3, *rows.labels[1][:-1], 0]]
    assert batch["decoder_attention_mask"].sum() == sum(map(len, rows.labels))
    path.write_text('{"text": "hello world"}')
    (plain,) = read(path, task).samples
    assert not task.has_target(plain)
    assert task.encode([plain])["decoder_input_ids"].tolist() == [[3]]
    for wrong in ('{"text": "hello", "target": 5}', '{"text": "hello", "target": " "}', '{"text": 5, "target": "a"}'):
        path.write_text(wrong)
        with pytest.raises(DataError, match="row 1"):
            read(path, task)
    task.limit_ids(task.tokenizer.token_to_id("world"))
    path.write_text('{"text": "hello", "target": "hello"}\n{"text": "hello", "target": "hello world"}')
    with pytest.raises(DataError, match="row 2: the text to write has a token with the id"):
        read(path, task)
    task = load_source(models.save_bart_writer(tmp_path / "m", forced_bos_token_id=7)).task
    assert task.encode_text("hello world")[:2] == (7, task.tokenizer.token_to_id("hello"))
    assert task.encode_text("hello world")[-1] == 3


def test_targets_of_unlabelled_samples_are_what_the_original_writes(tmp_path):
    source = CheckpointSource.of(load_source(models.save_t5(tmp_path / "m", max_length=12)))
    splits = make_samples(source.task, 0)
    found = write_reference_texts(splits, source, Cache(tmp_path / "cache"), QUIET, 0)
    (sample, *_) = found.judge.samples
    assert all(map(source.task.has_target, found.judge.samples))
    assert isinstance(sample, TargetedText)
    inputs = {name: array for name, array in source.task.encode([str(sample)]).items() if "decoder" not in name}
    del inputs["past"]
    written = write_by_transformers(source.checkpoint, inputs, source.task.generation)
    assert list(sample.target) == source.task.cut(written[0].tolist())
    assert found.judge.fingerprint != splits.judge.fingerprint
    again = write_reference_texts(found, source, Cache(tmp_path / "cache"), QUIET, 0)
    assert again.judge is found.judge


def test_fine_tuning_teaches_what_to_write(tmp_path):
    source = models.save_t5(tmp_path / "m", max_new_tokens=8)
    task = load_source(source).task
    rows = [{"text": text, "target": "hello world"} for text in task.examples(64)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    rows, cache = tmp_path / "rows.jsonl", Cache(tmp_path / "cache")
    tuned = tune(source, rows, tmp_path / "tuned", cache, lr=0.01, batch_size=16, steps=40, generate=2)
    assert tuned.after["loss"] < tuned.before["loss"] / 2
    assert tuned.after["perplexity"] == pytest.approx(np.exp(tuned.after["loss"]))
    told = (tmp_path / "tuned" / "training" / "answers.jsonl").read_text().splitlines()
    assert json.loads(told[-1]).keys() == {"step", "given", "answer", "wanted"}
    checkpoint = load_source(tmp_path / "tuned")
    assert checkpoint.task.generation == task.generation
    texts = task.examples(5, seed=3)
    inputs = {name: array for name, array in task.encode(texts).items() if name in ("input_ids", "attention_mask")}
    written = write_by_transformers(checkpoint, inputs, task.generation)
    assert all("hello world" in answer["text"] for answer in task.decode({"sequences": written}, texts))
