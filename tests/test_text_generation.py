"""Language models that write: captured with a cache, they write what transformers writes, beyond their windows too."""

import copy
import json
import pickle
import shutil

import models
import numpy as np
import onnx
import pytest
import torch
import transformers
from language_models import FAMILIES, GROUPED, WINDOW, mark_swept, open_decoder, save
from originals import tiny_tokenizer
from served import running

from compress.pipeline import compress
from compress.search import layer_timing
from compress.search.constraints import Constraints
from compress.search.evaluation import measure_artifact, open_context
from compress.search.search_candidate import describe_misses
from compress.transformer.surgery import keep_units
from export.formats.quantized_model import read_quantized_model
from export.pipeline import export
from export.validation.drift import compare_outputs
from laconic.arrays import Arrays
from laconic.artifacts.artifact import Artifact
from laconic.artifacts.gain import list_gains
from laconic.artifacts.inspection import summarize
from laconic.artifacts.record import Record
from laconic.cache import Cache
from laconic.data.reader import make_dataset
from laconic.errors import CorruptArtifact, DataError, InputError, RuntimeFailure
from laconic.models.anatomy import anatomy
from laconic.models.language_model import align_right
from laconic.models.source import CheckpointSource
from laconic.models.source_loading import load_source
from laconic.progress import Steps
from laconic.recipes.recipe import Recipe
from laconic.recipes.splits import check_labels
from laconic.runtimes.decoder_file import rounded_name
from laconic.runtimes.model_session import open_model
from laconic.runtimes.runtime import make_runtime
from laconic.tasks.chat_template import ChatTemplate, MarkedText, mark_completion
from laconic.tasks.fidelity import measure_fidelity
from laconic.tasks.generation_settings import GenerationSettings
from laconic.tasks.task import open_task
from laconic.tasks.text import Tokens
from laconic.tasks.text2text_generation import TargetedText
from laconic.tasks.text_generation import COMPARED_TOKENS, PROMPT_TOKENS, TextGeneration, describe_inputs

QUIET = Steps(quiet=True)
TASK = "text-generation"


@pytest.fixture(scope="module", params=mark_swept(*FAMILIES))
def family(request, shared):
    """A checkpoint of a family, and the file of its decoder."""
    source, decoder = open_decoder(shared, request.param)
    return load_source(source, task=TASK), decoder


def encode_prompts(task, count=6) -> Arrays:
    """Prompts of different lengths as a server encodes several of them."""
    encoded = task.encode(task.examples(count))
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}


@pytest.mark.sweep("opt-*")
@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_what_is_written_is_what_transformers_writes_beyond_every_window(family, engine):
    checkpoint, decoder = family
    settings = checkpoint.task.settings.model_copy(update={"max_new_tokens": 24, "eos_token_id": ()})
    prompts = encode_prompts(checkpoint.task)
    assert prompts["input_ids"].shape[1] > 2 * WINDOW
    expected = []
    for row, mask in zip(prompts["input_ids"], prompts["attention_mask"], strict=True):
        length = len(row) - int(mask[::-1].argmax())
        alone = torch.from_numpy(row[None, :length])
        written = checkpoint.module.model.generate(
            alone, attention_mask=torch.ones_like(alone), do_sample=False, max_new_tokens=24, eos_token_id=None,
            pad_token_id=0, use_cache=True,
        )  # fmt: skip
        expected.append(written[0, length:].tolist())
    with open_model(decoder, make_runtime(engine).open, settings) as session:
        written = session.run(prompts)["sequences"]
    assert written.tolist() == expected
    assert len({tuple(row) for row in expected}) > 1


def test_any_chunks_of_a_text_give_what_the_whole_text_gives(family):
    checkpoint, decoder = family
    ids = checkpoint.task.encode([Tokens(tuple(np.random.default_rng(0).integers(4, 30, 40).tolist()))])["input_ids"]
    with open_model(decoder, make_runtime("onnxruntime").open) as session:
        whole = session.decode(ids, np.arange(40)[None], session.make_empty(1))["logits"]
        for sizes in ((1, 39), (39, 1), (13, 13, 14), (1,) * 40):
            past, start, logits = session.make_empty(1), 0, []
            for size in sizes:
                places = np.arange(start, start + size)[None]
                outputs = session.decode(ids[:, start : start + size], places, past)
                logits.append(outputs["logits"])
                past = {name.replace("present", "past"): array for name, array in outputs.items() if name != "logits"}
                start += size
            np.testing.assert_allclose(np.concatenate(logits, axis=1), whole, atol=1e-4)


def test_an_answer_ends_with_the_end_token_and_prompts_do_not_disturb_each_other(family):
    checkpoint, decoder = family
    settings = checkpoint.task.settings.model_copy(update={"max_new_tokens": 24, "eos_token_id": ()})
    prompts = encode_prompts(checkpoint.task)
    with open_model(decoder, make_runtime("onnxruntime").open, settings) as session:
        free = session.run(prompts)["sequences"]
        end = int(free[0, 5])
        session.generation = settings.model_copy(update={"eos_token_id": (end,), "pad_token_id": 1})
        ended = session.run(prompts)["sequences"]
        lone = session.run({name: array[2:3] for name, array in prompts.items()})["sequences"]
    for before, after in zip(free.tolist(), ended.tolist(), strict=True):
        stop = before.index(end) + 1 if end in before else len(before)
        assert after == before[:stop] + [1] * (len(before) - stop)
    assert lone.tolist() == ended[2:3].tolist()


def test_nothing_is_written_beyond_the_context(family):
    checkpoint, decoder = family
    prompts = encode_prompts(checkpoint.task, 1)
    length = prompts["input_ids"].shape[1]
    settings = checkpoint.task.settings.model_copy(update={"max_new_tokens": 9, "eos_token_id": ()})
    with open_model(decoder, make_runtime("onnxruntime").open, settings) as session:
        free = session.run(prompts)["sequences"][0].tolist()
        for room in (0, 1, 4):
            session.generation = settings.model_copy(update={"max_length": length + room, "eos_token_id": (39,)})
            assert session.run(prompts)["sequences"][0].tolist() == free[:room] + [39] + [0] * (8 - room)


def test_a_target_gets_the_distributions_of_the_module_and_nothing_else_does(family):
    checkpoint, decoder = family
    inputs = checkpoint.task.encode([TargetedText(text, (5, 6, 7)) for text in checkpoint.task.examples(3)])
    with (
        open_model(decoder, make_runtime("openvino").open) as session,
        CheckpointSource.of(checkpoint).open(1) as original,
    ):
        expected, actual = original.run(inputs), session.run(inputs)
        np.testing.assert_allclose(actual["probabilities"], expected["probabilities"], atol=1e-4)
        np.testing.assert_allclose(actual["log_likelihoods"], expected["log_likelihoods"], atol=1e-3)
        assert (actual["log_likelihoods"] < 0).sum() == actual["log_likelihoods"][:, :-1].size
        filled = (actual["probabilities"] != 0).any(axis=-1)
        np.testing.assert_array_equal(filled, inputs["attention_mask"] == 1)
        assert filled.sum() == 9
        with pytest.raises(RuntimeFailure, match="nothing says how this model writes"):
            session.run(encode_prompts(checkpoint.task))


def make_task(max_tokens=100, **options):
    return TextGeneration(
        tiny_tokenizer(),
        describe_inputs(16, (2, 1, 4)),
        max_tokens=max_tokens,
        pad_id=0,
        start_id=1,
        generation=GenerationSettings(decoder_start_token_id=1, eos_token_id=(2,)),
        **options,
    )


def test_a_long_text_is_cut_to_its_prompt_and_a_marked_answer_is_the_target():
    task = make_task()
    long = " ".join(task.examples(8))
    ((prompt, target),) = task.divide([long])
    assert (len(prompt), target) == (PROMPT_TOKENS, [])
    marked = mark_completion("the cat sat", " on a mat")
    ((prompt, target),) = task.divide([marked])
    ids = task.tokenizer.encode(str(marked)).ids
    assert prompt + target == ids
    assert task.tokenizer.decode(target) == "on a mat"
    ((_, target),) = task.divide([mark_completion("the model", " " + long)])
    assert len(target) == COMPARED_TOKENS
    assert task.has_target(marked)
    assert not task.has_target(long)


def test_prompt_and_target_fit_into_a_short_context():
    task = make_task(max_tokens=20)
    long = "the cat sat on a mat and looked at red blue green birds " * 3
    ((prompt, target),) = task.divide([TargetedText(long, tuple(range(2, 15)) * 5)])
    assert (len(prompt), len(target)) == (10, 10)
    assert task.reference_settings.max_new_tokens == 10
    ((prompt, target),) = task.divide([mark_completion(long[:56], long[55:])])
    assert len(prompt) + len(target) <= 20
    assert task.timed(2, 128)["input_ids"].shape == (2, 4)


def test_the_last_answer_of_a_chat_is_the_target():
    chat = ChatTemplate(
        "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}",
        {},
    )
    task = make_task(chat=chat)
    turns = [("user", "the cat"), ("assistant", "sat"), ("user", "birds"), ("assistant", "red green")]
    messages = [{"role": role, "content": content} for role, content in turns]
    ((sample,), label) = task.read_row({"messages": messages}, None)
    assert isinstance(sample, MarkedText)
    assert label is None
    ((prompt, target),) = task.divide([sample])
    assert task.tokenizer.decode(target) == "red green"
    assert prompt + target == task.tokenizer.encode(str(sample), add_special_tokens=False).ids[: len(prompt + target)]
    assert task.read_row({"text": "the cat sat", "label": "of another kind"}, None) == (("the cat sat",), None)
    with pytest.raises(InputError, match="no chat template"):
        make_task().read_row({"messages": messages}, None)


def test_answers_of_the_original_are_cut_at_their_end_and_at_tokens_that_the_tokenizer_lacks():
    task = make_task()
    written = np.array([[5, 6, 2, 7], [5, 10**6, 6, 7], [10**6, 5, 6, 7]])
    assert [each.target for each in task.with_answers(["a", "b", "c"], written)] == [(5, 6, 2), (5,), ()]
    mask = task.encode([TargetedText("the model", ())])["attention_mask"]
    assert mask.sum() == 1


def test_null_answers_fail_and_each_figure_tells_a_model_from_its_neighbour():
    rng = np.random.default_rng(0)
    task = make_task()
    chosen = rng.integers(0, 20, (60, 6))
    logits = 6 * np.eye(20)[chosen] + rng.normal(0, 1, (60, 6, 20))
    shares = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    reference = {"probabilities": shares.astype(np.float32), "tokens": shares.argmax(axis=-1)}
    for name, answer in task.null_answers(reference).items():
        assert not task.tolerance.met_by(measure_fidelity(task, reference, answer)), name
        figures = {each.name: each for each in task.agreements(reference, answer)}
        assert figures["agreement"].value < figures["agreement"].least, name
        assert figures["prefix_kept"].value < 0.2, name
        assert figures["exp_minus_kl"].value < 0.5, name


def test_perplexity_is_of_the_texts_own_tokens_and_of_marked_answers():
    task = make_task()
    samples = [
        "the model learns the weights",
        TargetedText("the cat", (5, 6, 7)),
        mark_completion("the cat", " runs and learns the"),
    ]
    batch = task.encode(samples)
    rng = np.random.default_rng(0)
    likelihoods = -rng.random(batch["input_ids"].shape).astype(np.float32)
    labels = task.label_samples(samples, None)
    lengths = [len(prompt) for prompt, _ in task.divide(samples)]
    answer = len(task.divide(samples)[2][1])
    assert answer > 1
    assert labels == [range(lengths[0] - 1), range(lengths[1] - 1), range(lengths[2] - 1, lengths[2] + answer - 2)]
    counted = np.concatenate([row[each.start : each.stop] for row, each in zip(likelihoods, labels, strict=True)])
    scorer = task.scorer({"log_likelihoods": likelihoods}, labels)
    assert scorer(np.arange(3)) == pytest.approx(float(counted.mean()))
    assert task.label_samples(["the"], None) is None
    check_labels(make_dataset(["the model"], task), task, 0.03)
    with pytest.raises(DataError, match=r"no text of .* has a token behind"):
        check_labels(make_dataset(["the"], task), task, 0.03)


def test_a_model_without_information_loses_perplexity_beyond_doubt():
    rng = np.random.default_rng(0)
    task = make_task()
    labels = [range(10)] * 40
    reference = {name: np.zeros((40, 10, 20), np.float32) for name in ("probabilities",)}
    reference |= {"tokens": np.zeros((40, 10), np.int64)}
    good = np.log(rng.uniform(0.2, 0.9, (40, 10))).astype(np.float32)
    near = (good + rng.normal(0, 0.01, good.shape)).astype(np.float32)
    uniform = np.full_like(good, -np.log(20))
    verdicts = {}
    for name, likelihoods in (("near", near), ("uniform", uniform)):
        comparison = compare_outputs(
            task, reference | {"log_likelihoods": good}, reference | {"log_likelihoods": likelihoods}, labels,
            tolerance=task.tolerance, max_drop=0.01,
        )  # fmt: skip
        verdicts[name] = comparison.judge("metric_change")
        low, high = comparison.intervals["perplexity_ratio"]
        assert low < comparison.figures["perplexity_ratio"] < high
    assert verdicts == {"near": "passed", "uniform": "failed"}
    assert comparison.figures["perplexity"] == pytest.approx(20, rel=1e-5)


def test_a_text_with_its_target_goes_to_another_process():
    again = pickle.loads(pickle.dumps(TargetedText("the cat", (5, 6))))
    assert (again, again.target) == ("the cat", (5, 6))


def test_prompts_are_moved_to_the_right_end_of_their_rows():
    ids = torch.tensor([[5, 6, 0, 0], [7, 8, 9, 0]])
    mask = torch.tensor([[0, 1, 0, 0], [1, 1, 1, 0]])
    aligned, told = align_right(ids, mask, 0)
    assert aligned.tolist() == [[0, 5, 6], [7, 8, 9]]
    assert told.tolist() == [[0, 1, 1], [1, 1, 1]]


OUT_OF_REACH = {"max_divergence": 1e-9, "max_first_token": "1 ns", "min_tokens_per_second": 1e9}
MISSED = ("divergence of the next token is ", "time to the first token is ", "the tokens behind the first come at ")


CUTS = [{"prune.heads": {"keep": 0.5}}, {"prune.ffn": {"keep": 0.5}}, {"distill.heal": {"steps": 2}}]


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory, shared):
    """Llama with weights in 8 bits, and with half of its units, healed and in 4 bits; from texts without answers."""
    folder = tmp_path_factory.mktemp("artifacts")
    source, _ = open_decoder(shared, "llama")
    texts = load_source(source, task=TASK).task.examples(90)
    (folder / "texts.txt").write_text("\n".join(texts))
    made = {}
    for bits in (8, 4):
        recipe = {
            "source": str(source),
            "task": TASK,
            "data": {"calibrate": str(folder / "texts.txt")},
            "stages": [*(CUTS if bits == 4 else ()), {"quantize.weights": {"bits": bits, "group_size": 16}}],
            "heal": False,
            "goal": {"fidelity": 0.5}
            | {key: goal for key, goal in OUT_OF_REACH.items() if bits == 8 or key != "max_divergence"},
            "engine_only": "openvino",
            "int8_activations": bits == 4,
            "int4_value_cache": bits == 4,
        }
        destination = folder / f"llama{bits}.laconic"
        result = compress(Recipe.parse(recipe), destination, steps=QUIET, cache=Cache(shared / "cache"))
        assert [sum(each.startswith(said) for said in MISSED) for each in result.missed if "goal" in each] == [1] * (
            2 + (bits == 8)
        )
        made[bits] = result.artifact
    return made, texts


def test_a_search_judges_what_is_built_by_the_table_of_the_artifact(artifacts, shared, tmp_path, monkeypatch):
    monkeypatch.setattr(layer_timing, "RUNS", 2)
    made, texts = artifacts
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    content = {"task": TASK, "data": {"calibrate": str(tmp_path / "texts.txt")}, "goal": OUT_OF_REACH}
    source, _ = open_decoder(shared, "llama")
    recipe = Recipe.parse({"source": str(source), "stages": ["quantize.weights"], **content})
    context = open_context(recipe, trust=False, cache=shared / "cache", threads=1)
    constraints = Constraints.from_goal(recipe.goal, context.source.task, context.samples.choose)
    built = measure_artifact(context, recipe, made[8].path)
    speed = made[8].measured.writing[1]
    assert (built.first_token, built.tokens_per_second) == (speed.first_token, speed.tokens_per_second)
    assert 1e-9 < built.quality.divergence < 0.01
    misses = describe_misses(constraints, built)
    assert all(said in misses for said in ("divergence", "to the first token, asked for", "tokens/s, asked for"))


def test_an_artifact_is_proven_along_what_the_original_writes(artifacts):
    made, _ = artifacts
    fidelity = {bits: each.manifest.verdict.drift[0].figures["fidelity"] for bits, each in made.items()}
    assert fidelity[8] > fidelity[4] > 0.5
    assert fidelity[8] > 0.98
    assert made[8].size > made[4].size
    figures = {bits: [each.figures["divergence"] for each in one.manifest.history] for bits, one in made.items()}
    assert [len(each) for each in figures.values()] == [1, 4]
    assert 0 < figures[8][0] < min(figures[4])
    config = read_quantized_model(made[4]).model.config
    assert (config.num_attention_heads, config.num_key_value_heads, config.intermediate_size) == (2, 1, 32)
    figures = {name for each in made[8].manifest.verdict.information for name in each.figures}
    assert {"agreement", "prefix_kept", "exp_minus_kl"} <= figures
    figures, interval = (getattr(made[8].manifest.verdict.drift[0], name) for name in ("figures", "intervals"))
    low, high = interval["perplexity_ratio"]
    assert 0.99 < low < figures["perplexity_ratio"] < high < 1.01
    assert figures["perplexity"] / figures["perplexity_original"] == pytest.approx(
        figures["perplexity_ratio"], abs=1e-5
    )
    original, artifact = made[8].measured.writing
    assert (original.engine, original.prompt) == ("original", artifact.prompt)
    rows = {row.figure for row in list_gains(made[8].manifest, made[8].measured, "")}
    assert {"perplexity", "time to first token", "tokens behind it"} <= rows
    assert set(made[4].manifest.precision.values()) == {"int4-weight", "int8-weight"}
    assert {"model.onnx", "generation.json"} <= set(made[8].manifest.files)


def test_inputs_are_rounded_to_int8_where_that_is_asked_for_and_the_processor_can(artifacts):
    made, _ = artifacts
    can = make_runtime("openvino").has_int8_dynamic()
    assert {bits: each.manifest.compute for bits, each in made.items()} == {
        8: "float32",
        4: "int8-dynamic" if can else "float32",
    }
    linear = [each for each in made[4].measured.products if each.kind == "linear"]
    expected = "int8" if can else "float32"
    assert {each.planned for each in linear} == {expected}
    assert {each.runs for each in linear if each.kernel} == {expected}
    assert {each.planned for each in made[4].measured.products if each not in linear} <= {"float32"}


def test_keys_are_kept_in_8_bits_and_values_in_4_where_that_is_asked_for(artifacts):
    made, _ = artifacts
    assert {bits: each.manifest.int8_kv_cache for bits, each in made.items()} == {8: False, 4: True}
    names = {
        bits: {name for node in onnx.load(each.model).graph.node for name in node.output} for bits, each in made.items()
    }
    for name in (rounded_name(0), rounded_name(1, 4)):
        assert {bits: name in each for bits, each in names.items()} == {8: False, 4: True}
    assert summarize(made[4])["int4_value_cache"]
    assert made[4].manifest.placements[0].arithmetic.endswith(", INT8 key cache, INT4 value cache")


@pytest.mark.sweep("8-openvino")
@pytest.mark.parametrize(("bits", "engine"), [(8, "onnxruntime"), (8, "openvino"), (4, "openvino")])
def test_a_server_writes_what_the_session_writes(artifacts, bits, engine):
    """In 4 bits with keys in 8 and values in 4."""
    made, texts = artifacts
    artifact, name = made[bits], f"llama{bits}"
    with artifact.open(engine) as session:
        expected = artifact.task().decode(session.run(artifact.task().encode_request(texts[0])), texts[:1])
    with running(artifact.path, runtime=engine) as server, server.client() as client:
        answer = client.post(f"/v1/models/{name}/predict", json={"text": texts[0]})
        assert answer.json()["answers"] == expected
        refused = client.post(f"/v1/models/{name}/predict", json={"text": " ".join(texts)})
        assert refused.status_code == 400
        assert "leaves no room for an answer" in refused.text
        described = client.get(f"/v2/models/{name}").json()
        assert [each["name"] for each in described["inputs"]] == ["input_ids", "attention_mask"]
        assert [each["name"] for each in described["outputs"]] == ["sequences"]
        assert client.get("/openapi.json").status_code == 200


def test_a_file_that_is_no_decoder_is_refused(artifacts, tmp_path):
    made, _ = artifacts
    copy = tmp_path / "copy.laconic"
    shutil.copytree(made[8].path, copy)
    with pytest.raises(CorruptArtifact, match="other inputs than a language model"):
        open_task(TASK, copy, made[8].manifest.inputs[:1])
    settings = json.loads((copy / "generation.json").read_text()) | {"max_new_tokens": 10**6}
    (copy / "generation.json").write_text(json.dumps(settings))
    with pytest.raises(CorruptArtifact, match="does not hold the files of task"):
        open_task(TASK, copy, made[8].manifest.inputs)
    assert Artifact.load(made[8].path).task().settings.eos_token_id


def test_a_model_that_keeps_no_keys_and_values_scores_texts_and_learns(tmp_path):
    task = load_source(models.save_mamba(tmp_path / "mamba")).task
    assert [spec.name for spec in task.inputs] == ["input_ids", "attention_mask"]
    assert (task.name, task.generation) == (TASK, None)


def test_a_model_of_convolutions_alone_writes_without_a_cache(tmp_path):
    shape = GROUPED | {"layer_types": ["conv", "conv"]}
    model = transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**shape))
    checkpoint = load_source(models.save_transformer(tmp_path / "lfm2", model))
    source = {"input_ids": torch.tensor([[5, 6, 7], [8, 0, 0]]), "attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0]])}
    written = checkpoint.module.generate(source, checkpoint.task.reference_settings)
    for tokens, answer in zip(([5, 6, 7], [8]), written, strict=True):
        logits = checkpoint.module.model(input_ids=torch.tensor([[*tokens, *answer]]), use_cache=False).logits
        assert logits[0, len(tokens) - 1 : -1].argmax(dim=-1).tolist() == answer.tolist()


def test_a_server_scores_with_a_model_that_cannot_write(shared, tmp_path):
    source = save(tmp_path / "source", "openai-gpt")
    path = tmp_path / "scores.laconic"
    recipe = {"source": str(source), "task": TASK, "stages": [], "engine_only": "openvino"}
    export(Recipe.parse(recipe), path, cache=Cache(shared / "cache"))
    model, text = transformers.OpenAIGPTLMHeadModel.from_pretrained(source).eval(), "the model answers"
    with running(path) as server, server.client() as client:
        task = server.app.repository.get("scores").artifact.task()
        answer = client.post("/v1/models/scores/predict", json={"text": [text, "the"]}).json()
        for route, prompt in (("chat/completions", {"messages": [{"role": "user", "content": text}]}),
                              ("completions", {"prompt": text})):  # fmt: skip
            refused = client.post(f"/v1/{route}", json={"model": "scores", **prompt})
            assert refused.status_code == 400
            assert "does text-generation, and writes no texts" in refused.json()["error"]["message"]
        assert client.post("/v2/models/scores/generate", json={"text_input": text}).status_code == 400
        described = client.get("/v2/models/scores").json()
        assert [each["name"] for each in described["inputs"]] == ["input_ids", "attention_mask"]
        paths, metrics = client.get("/openapi.json").json()["paths"], client.get("/metrics").text
    assert not {"/v1/completions", "/v1/chat/completions"} & set(paths)
    assert "laconic_generation" not in metrics
    ids = [torch.from_numpy(task.encode_request(each)["input_ids"]) for each in (text, "the")]
    with torch.inference_mode():
        likeliest = [int(model(input_ids=each).logits[0, -1].argmax()) for each in ids]
    assert answer["answers"] == [{"text": task.write([token])} for token in likeliest]


def test_layers_of_different_heads_leave_a_model_that_scores(tmp_path):
    checkpoint = load_source(save(tmp_path / "source", "gpt2"))
    module = copy.deepcopy(checkpoint.module)
    keep_units(module, anatomy(module).of("heads")[0], [0])
    pruned = checkpoint.after(Record(stage="prune.heads", config={}, key="", figures={}), module)
    assert pruned.task.generation is None
    text = "the model answers"
    inputs = pruned.task.encode_request(text)
    assert inputs["attention_mask"][0].tolist() == [0] * (inputs["input_ids"].shape[1] - 1) + [1]
    with CheckpointSource.of(pruned).open(1) as session:
        (answer,) = pruned.task.decode(session.run(inputs), [text])
    ids = torch.from_numpy(inputs["input_ids"])
    assert answer == {"text": pruned.task.write([int(module.choose_next(ids, torch.ones_like(ids)))])}


def test_the_same_heads_less_in_each_layer_leave_a_cache(tmp_path):
    checkpoint = load_source(save(tmp_path / "source", "llama"))
    module = copy.deepcopy(checkpoint.module)
    for site in anatomy(module).of("heads"):
        keep_units(module, site, [0])
    pruned = checkpoint.after(Record(stage="prune.heads", config={}, key="", figures={}), module)
    before, after = (each.task.shape_past(1, 3) for each in (checkpoint, pruned))
    assert after == (before[0], before[1], before[2] // 2, *before[3:])
