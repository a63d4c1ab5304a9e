"""Heads on a text encoder: each is fine-tuned, compressed, and served with the answers of transformers' pipeline."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
import transformers
from artifacts import text_inputs
from contexts import tune
from served import running

from compress.pipeline import compress
from export.pipeline import export
from laconic.errors import DataError, InputError, SourceError
from laconic.models.source_loading import load_source
from laconic.models.torch_session import TorchSession
from laconic.progress import Steps
from laconic.recipes.recipe import Recipe
from laconic.tasks.multi_label_classification import MultiLabelClassification
from laconic.tasks.question_answering import QuestionAnswering
from laconic.tasks.text import WORDS
from laconic.tasks.text_ranking import TextRanking
from laconic.tasks.text_regression import TextRegression
from laconic.tasks.token_classification import TokenClassification

QUIET = Steps(quiet=True)
TEXTS = ["the model answers fast", "every request waits for its turn and the memory"]
NAMES = {"red": 0, "green": 1, "blue": 2}


@dataclass(frozen=True)
class Family:
    """A model, rows to learn from, and how the answers of a pipeline compare with those over HTTP.

    row: makes a row of a file from words. samples: in a request. expected: the numbers in the pipeline's answer to a
    sample. found: the numbers in ours. write: saves the model, where that is not BERT with this config and a head.
    """

    task: str
    config: dict[str, Any]
    row: Callable[[list[str]], dict[str, Any]]
    samples: list[Any]
    expected: Callable[[Any, Any], Any]
    found: Callable[[Any], Any]
    field: str = "text"
    pipeline: str = "text-classification"
    kind: type[transformers.PreTrainedModel] = transformers.BertForSequenceClassification
    write: Callable[[Path], Path] | None = None

    def save(self, folder: Path) -> Path:
        if self.write is not None:
            return self.write(folder)
        return models.save_bert(folder, self.kind, **{"num_hidden_layers": 1, **self.config})

    def write_rows(self, path: Path, count: int = 160) -> Path:
        rng = np.random.default_rng(0)
        rows = [self.row([str(word) for word in rng.choice(WORDS, rng.integers(3, 12))]) for _ in range(count)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path


def sorted_scores(answer: Any) -> list[tuple[str, float]]:
    return sorted((each["label"], each["score"]) for each in answer)


def entities_of(answer: Any) -> list[tuple[Any, ...]]:
    return [tuple(each[key] for key in ("entity_group", "score", "word", "start", "end")) for each in answer]


FAMILIES = {
    "regression": Family(
        task="text-regression",
        config={"id2label": {0: "score"}, "label2id": {"score": 0}, "problem_type": "regression"},
        row=lambda words: {"text": " ".join(words), "label": 3 + words.count("fast")},
        samples=TEXTS,
        expected=lambda pipe, text: pipe(text)[0]["score"],
        found=lambda answer: answer["score"],
    ),
    "cross-encoder": Family(
        task="text-ranking",
        config={
            "id2label": {0: "LABEL_0"},
            "label2id": {"LABEL_0": 0},
            "sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"},
        },
        row=lambda words: {"text1": words[0], "text2": " ".join(words[1:]), "label": float(words[0] in words[1:])},
        samples=[["the time", text] for text in TEXTS],
        expected=lambda pipe, pair: pipe({"text": pair[0], "text_pair": pair[1]})["score"],
        found=lambda answer: answer["score"],
    ),
    "multi-label": Family(
        task="multi-label-classification",
        config={
            "problem_type": "multi_label_classification",
            "id2label": {index: name for name, index in NAMES.items()},
            "label2id": NAMES,
        },
        row=lambda words: {
            "text": " ".join(words),
            "label": [name for name, word in (("red", "the"), ("green", "fast"), ("blue", "time")) if word in words],
        },
        samples=TEXTS,
        expected=lambda pipe, text: sorted_scores(pipe(text, top_k=None)),
        found=lambda answer: sorted_scores(answer["scores"]),
    ),
    "entities": Family(
        task="token-classification",
        kind=transformers.BertForTokenClassification,
        pipeline="token-classification",
        config={
            "num_hidden_layers": 2,
            "id2label": {0: "O", 1: "B-PACE", 2: "I-PACE"},
            "label2id": {"O": 0, "B-PACE": 1, "I-PACE": 2},
        },
        row=lambda words: {"tokens": words, "tags": ["B-PACE" if word == "fast" else "O" for word in words]},
        samples=[*TEXTS, "the model of zork"],
        expected=lambda pipe, text: entities_of(pipe(text, aggregation_strategy="simple")),
        found=lambda answer: entities_of(answer["entities"]),
    ),
}
MASKED = Family(
    task="fill-mask",
    config={},
    row=lambda words: {"text": " ".join(words)},
    samples=["the model [MASK] fast", "[MASK]"],
    expected=lambda pipe, text: [(each["token_str"], each["score"]) for each in pipe(text)],
    found=lambda answer: [(each["token"], each["score"]) for each in answer["scores"]],
    pipeline="fill-mask",
    write=models.save_masked_bert,
)
SERVED = {**FAMILIES, "masked": MASKED}
each_family = pytest.mark.parametrize("name", FAMILIES)


def flatten(value: Any) -> tuple[list[str], list[float]]:
    """The words and the numbers in a value, in order."""
    if isinstance(value, (list, tuple)):
        parts = [flatten(each) for each in value]
        return [word for words, _ in parts for word in words], [number for _, numbers in parts for number in numbers]
    return ([value], []) if isinstance(value, str) else ([], [float(value)])


def check_answers(family: Family, folder: Path, answers: list[Any]) -> None:
    """Compare the answers to a family's samples with those of transformers' pipeline."""
    pipe = transformers.pipeline(family.pipeline, model=str(folder), device="cpu")
    for sample, answer in zip(family.samples, answers, strict=True):
        words, numbers = flatten(family.expected(pipe, sample))
        assert flatten(family.found(answer))[0] == words
        assert flatten(family.found(answer))[1] == pytest.approx(numbers, abs=1e-4)


@pytest.mark.parametrize("name", SERVED)
def test_answers_are_those_of_the_pipeline(name, tmp_path):
    family = SERVED[name]
    folder = family.save(tmp_path / "model")
    checkpoint = load_source(folder)
    task = checkpoint.task
    assert task.name == family.task
    with TorchSession(checkpoint.module, checkpoint.inputs, checkpoint.outputs) as session:
        samples = [task.parse(sample) for sample in family.samples]
        answers = [task.decode(session.run(task.encode([sample])), [sample])[0] for sample in samples]
    check_answers(family, folder, answers)
    with pytest.raises(InputError):
        task.parse(7)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "entities" else pytest.mark.sweep) for n in SERVED])
def test_answers_over_http_are_those_of_the_pipeline_and_the_verdict_has_the_metric(name, tmp_path, cache):
    family = SERVED[name]
    folder, rows = family.save(tmp_path / "model"), family.write_rows(tmp_path / "rows.jsonl")
    recipe = Recipe.parse({"source": str(folder), "data": str(rows), "stages": [], "runtimes": ["onnxruntime"]})
    artifact = export(recipe, tmp_path / "m.laconic", steps=QUIET, cache=cache).artifact
    assert artifact.manifest.task == family.task
    assert artifact.manifest.verdict.failures == []
    assert "metric" in artifact.manifest.verdict.drift[0].figures
    with running(artifact.path) as server, server.client() as http:
        answer = http.post("/v1/models/m/predict", json={family.field: family.samples})
        assert answer.status_code == 200, answer.text
        check_answers(family, folder, answer.json()["answers"])
        assert http.post("/v1/models/m/predict", json={family.field: [7]}).status_code == 400


def test_masked_tokens_are_learnt_from_plain_texts(tmp_path, cache):
    rows = MASKED.write_rows(tmp_path / "texts.jsonl", 80)
    tuned = tune(MASKED.save(tmp_path / "model"), rows, tmp_path / "tuned", cache, batch_size=16, steps=10)
    assert tuned.after["loss"] < tuned.before["loss"]
    assert "masked-token accuracy" in tuned.after


@pytest.mark.parametrize("text", ["the model", "[MASK] [MASK]", 7, ["[MASK]"]])
def test_a_text_without_exactly_one_mask_is_refused(text, tmp_path):
    task = load_source(models.save_masked_bert(tmp_path / "model")).task
    with pytest.raises(InputError):
        task.parse(text)


def test_a_masked_model_without_a_mask_token_is_refused(tmp_path):
    with pytest.raises(SourceError, match="has no mask token"):
        load_source(models.save_bert(tmp_path / "model", transformers.BertForMaskedLM))


@each_family
def test_a_bare_encoder_learns_it_from_rows(name, tmp_path, cache):
    family = FAMILIES[name]
    source = models.save_bert(tmp_path / "model", transformers.BertModel)
    rows = family.write_rows(tmp_path / "rows.jsonl", 80)
    tuned = tune(source, rows, tmp_path / "tuned", cache, task=family.task, batch_size=16, steps=10)
    assert tuned.after["loss"] < tuned.before["loss"]
    assert tuned.checkpoint.task.metric in tuned.after
    assert load_source(tmp_path / "tuned").task.labels == tuned.checkpoint.task.labels


def test_a_multi_label_classifier_is_pruned_healed_and_quantized(tmp_path, cache):
    family = FAMILIES["multi-label"]
    recipe = Recipe.parse(
        {
            "source": str(family.save(tmp_path / "model")),
            "data": str(family.write_rows(tmp_path / "rows.jsonl")),
            "stages": [{"prune.ffn": {"keep": 0.8, "round_to": 4}}, "quantize.static"],
            "heal": {"steps": 4, "eval_every": 4, "loader": {"workers": 0}},
            "runtimes": ["onnxruntime"],
            "goal": {"fidelity": 0.5},
        }
    )
    manifest = compress(recipe, tmp_path / "m.laconic", steps=QUIET, cache=cache).artifact.manifest
    assert manifest.verdict.failures == []
    assert "metric" in manifest.verdict.drift[0].figures


def test_one_output_is_a_score_and_not_a_class(tmp_path):
    folder = models.save_bert(tmp_path / "one", id2label={0: "score"}, label2id={"score": 0})
    assert load_source(folder).task.name == "text-regression"
    with pytest.raises(SourceError, match=r"1 outputs, which is not for the task 'text-classification'. Try --task"):
        load_source(folder, task="text-classification")


def test_the_scores_of_a_cross_encoder_are_what_its_activation_says(tmp_path):
    for kind, expected in (("Identity", "identity"), ("Sigmoid", "sigmoid")):
        marks = {"sentence_transformers": {"activation_fn": f"torch.nn.modules.linear.{kind}"}}
        folder = models.save_bert(tmp_path / kind, id2label={0: "a"}, label2id={"a": 0}, **marks)
        assert load_source(folder).task.assets()["preprocess.json"].decode().count(expected) == 1
    marks = {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Softplus"}}
    folder = models.save_bert(tmp_path / "other", id2label={0: "a"}, label2id={"a": 0}, **marks)
    with pytest.raises(SourceError, match="'Softplus'; expected one of Identity, Sigmoid"):
        load_source(folder)


def make(kind: type[Any], **settings: Any) -> Any:
    spec = {"max_tokens": 16, "pad_id": 0}
    return kind(models.tokenizer(), text_inputs(), **spec, **settings)


def test_regression_explains_the_variance_of_the_labels():
    task = make(TextRegression, labels=("score",))
    labels = [[1.0], [2.0], [3.0]]
    every = np.arange(3)
    assert task.scorer({"y": np.array(labels)}, labels)(every) == 1
    assert task.scorer({"y": np.full((3, 1), 2.0)}, labels)(every) == 0
    assert task.scorer({"y": np.full((3, 1), 2.0)}, labels)(np.zeros(3, int)) == 0
    assert task.fidelity({"y": np.array([[3.0], [-3.0]])}, {"y": np.array([[3.0], [-2.7]])}) == pytest.approx(
        [1, 1 / 1.005]
    )


@pytest.mark.parametrize("label", ["x", True, None, [], float("nan"), [1, "b"], {"a": 1}])
def test_what_is_no_number_is_no_score(label):
    with pytest.raises(DataError, match="is no score"):
        make(TextRegression).parse_label(label, "")


def test_labels_of_a_head_with_other_outputs_or_without_a_relevance_are_refused():
    with pytest.raises(DataError, match="holds 2 numbers, and the model answers with 1"):
        make(TextRegression, labels=("score",)).parse_label([1, 2], "")
    with pytest.raises(DataError, match="1 to 2 numbers"):
        TextRegression.new_classes([1, [1, 2]], ())
    assert TextRegression.new_classes([[1, 2]], ("score",)) == ("0", "1")
    with pytest.raises(DataError, match="no relevance"):
        make(TextRanking).parse_label(2, "")


def test_classes_are_found_and_counted_one_by_one():
    task = make(MultiLabelClassification, labels=("red", "green", "blue"))
    assert task.parse_label(["red", 2], "") == [1, 0, 1]
    assert task.parse_label("green", "") == [0, 1, 0]
    assert task.parse_label([], "") == [0, 0, 0]
    with pytest.raises(DataError, match="'pink' is none of the model's classes"):
        task.parse_label(["pink"], "")
    scorer = task.scorer({"y": np.array([[1.0, -1, 1], [-1, -1, -1]])}, [[1, 0, 0], [0, 0, 0]])
    assert scorer(np.array([0])) == pytest.approx(2 / 3)
    assert scorer(np.array([1])) == 1
    assert MultiLabelClassification.new_classes([["a", "b"], "c", []], ()) == ("a", "b", "c")
    assert MultiLabelClassification.new_classes([["a"]], ("a", "b")) == ()
    with pytest.raises(DataError, match="is no class"):
        MultiLabelClassification.new_classes([{"a": 1}], ())


def test_tags_become_entities_and_entities_become_classes_of_tokens():
    task = make(TokenClassification, labels=("O", "B-PER", "I-PER", "LOC"))
    (text,), label = task.read_row(
        {"tokens": ["hello", "a", "b", "world"], "tags": ["O", "B-PER", "I-PER", "O"]}, Path()
    )
    assert (text, label) == ("hello a b world", [{"label": "PER", "start": 6, "end": 9}])
    assert task.parse_label(label, text) == [-100, 0, 1, 2, 0, -100]
    assert task.read_row({"tokens": text.split(), "tags": [0, 1, 2, 0]}, Path()) == ((text,), label)
    with pytest.raises(InputError, match="tag 4 under 'tags' is the number of none of the model's 4 classes"):
        task.read_row({"tokens": ["a"], "tags": [4]}, Path())
    assert task.parse_label([{"label": "LOC", "start": 0, "end": 5}], text) == [-100, 3, 0, 0, 0, -100]
    assert TokenClassification.new_classes([label], ()) == ("O", "B-PER", "I-PER")
    assert TokenClassification.new_classes([label], task.labels) == ()


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("PER", "must be a list of entities"),
        ([{"start": 3, "end": 3, "label": "PER"}], "is no entity"),
        ([{"start": 0, "end": 2.5, "label": "PER"}], "is no entity"),
        ([{"start": 0, "end": 99, "label": "PER"}], "ends beyond the text, which has 7 characters"),
        ([{"start": 0, "end": 5, "label": "X"}], "'X' is none of the model's entities: PER"),
        ([{"start": 0, "end": 5, "label": "PER"}, {"start": 4, "end": 6, "label": "PER"}], "overlap"),
    ],
)
def test_what_is_no_entity_of_the_text_is_refused(label, message):
    with pytest.raises(DataError, match=message):
        make(TokenClassification, labels=("O", "B-PER")).parse_label(label, "hello a")


def test_an_entity_counts_where_its_ends_are_right_and_padding_does_not_count_for_fidelity():
    task = make(TokenClassification, labels=("O", "B-PER", "I-PER"))
    label = [-100, 1, 2, 0, 1, -100]
    right = {"y": np.eye(3)[[0, 1, 2, 0, 1, 0]][None]}
    half = {"y": np.eye(3)[[0, 1, 0, 0, 1, 0]][None]}
    assert task.scorer(right, [label])(np.array([0])) == 1
    assert task.scorer(half, [label])(np.array([0])) == 0.5
    task = make(TokenClassification, labels=("O", "B-PER"))
    alone, padded = np.ones((1, 2, 2)), np.concatenate([np.ones((1, 2, 2)), np.zeros((1, 3, 2))], axis=1)
    assert task.fidelity({"y": alone}, {"y": padded}) == pytest.approx([1])
    assert task.fidelity({"y": padded}, {"y": alone}) == pytest.approx([1])
    assert task.fidelity({"y": padded}, {"y": padded * np.array([9, -9])})[0] < 0.7


def save_answerer(folder: Path) -> Path:
    labels = {"id2label": {0: "start", 1: "end"}, "label2id": {"start": 0, "end": 1}}
    return models.save_bert(folder, transformers.BertForQuestionAnswering, num_hidden_layers=1, **labels)


def test_a_long_context_is_answered_in_windows_as_transformers_cuts_them(tmp_path, cache):
    folder = save_answerer(tmp_path / "model")
    recipe = Recipe.parse({"source": str(folder), "stages": [], "runtimes": ["onnxruntime"]})
    artifact = export(recipe, tmp_path / "m.laconic", steps=QUIET, cache=cache).artifact
    rng = np.random.default_rng(3)
    question = "the time"
    contexts = [" ".join(rng.choice(WORDS, length)) for length in (4, 70, 400)]
    with running(artifact.path, max_rows=20) as server, server.client() as http:
        for wrong, said in (
            ({"question": "the"}, "context"),
            ({"question": "the " * 99, "context": "a"}, "leaves no room"),
        ):
            refused = http.post("/v1/models/m/predict", json={"inputs": wrong})
            assert refused.status_code == 400
            assert said in refused.json()["error"]
        samples = [{"question": question, "context": context} for context in contexts]
        answers = http.post("/v1/models/m/predict", json={"inputs": samples}).json()["answers"]
        alone = http.post("/v1/models/m/predict", json={"inputs": samples[2]}).json()["answers"]
        endless = http.post(
            "/v1/models/m/predict", json={"inputs": {"question": question, "context": "the " * 300_000}}
        )
        many = http.post("/v1/models/m/predict", json={"inputs": samples[2:] * 2})
    assert (endless.status_code, many.status_code) == (400, 400)
    assert "parts of long ones" in many.json()["error"]
    assert "as long as" in endless.json()["error"]
    assert alone[0]["start"] == answers[2]["start"]
    own, tokens = load_source(folder).module.model, transformers.AutoTokenizer.from_pretrained(folder)
    length = artifact.task().max_tokens
    for context, answer in zip(contexts, answers, strict=True):
        assert answer["answer"] == context[answer["start"] : answer["end"]]
        stride = min(128, (length - len(tokens(question).input_ids) - 1) // 2)
        cut = {"truncation": "only_second", "max_length": length, "stride": stride, "return_overflowing_tokens": True}
        best = []
        windows = tokens(question, context, return_offsets_mapping=True, **cut)
        for index in range(len(windows.input_ids)):
            kept = [at for at, part in enumerate(windows.sequence_ids(index)) if part == 1]
            with torch.no_grad():
                logits = own(
                    torch.tensor([windows.input_ids[index]]),
                    token_type_ids=torch.tensor([windows.token_type_ids[index]]),
                )
            start, end = (each[0, [0, *kept]].softmax(0)[1:] for each in (logits.start_logits, logits.end_logits))
            scores = (start[:, None] * end[None, :]).triu().tril(14)
            low, high = divmod(int(scores.argmax()), len(kept))
            span = windows.offset_mapping[index][kept[low]][0], windows.offset_mapping[index][kept[high]][1]
            best.append((float(scores.max()), *span))
        score, *span = max(best)
        assert answer["score"] == pytest.approx(score, abs=1e-4)
        assert [answer["start"], answer["end"]] == span
    assert len(windows.input_ids) > 3


def test_an_encoder_learns_to_answer_questions(tmp_path, cache):
    source = models.save_bert(tmp_path / "model", transformers.BertModel)
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(60):
        words = [str(word) for word in rng.choice(WORDS, 8)] + ["fast"]
        context = " ".join(rng.permutation(words))
        answers = {"text": ["fast"], "answer_start": [context.index("fast")]}
        rows.append({"question": "how", "context": context, "answers": answers})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"task": "question-answering", "batch_size": 16, "steps": 10}
    tuned = tune(source, tmp_path / "rows.jsonl", tmp_path / "tuned", cache, **settings)
    assert tuned.after["loss"] < tuned.before["loss"]
    assert 0 <= tuned.after["token F1"] <= 1


def test_answers_that_are_not_in_the_context_are_refused():
    task = make(QuestionAnswering)
    sample = task.parse({"question": "the time", "context": "the model waits"})
    assert task.parse_label({"text": ["model"], "answer_start": [4]}, sample) == [5, 5, 4, 6]
    for value in ({"text": [], "answer_start": []}, {"text": ["model"], "answer_start": [3]}, "model", None):
        with pytest.raises(DataError):
            task.parse_label(value, sample)
