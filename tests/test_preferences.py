"""Preferences: rows with two answers, the losses of DPO and ORPO, and what a run with either reports and keeps."""

import json
import math
import pickle
from typing import cast

import models
import pytest
import torch
from rank_processes import by_two_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from laconic.config import NamedSettings
from laconic.data.reader import read
from laconic.errors import DataError, RecipeError
from laconic.models.checkpoint import Checkpoint
from laconic.models.source_loading import load_source
from laconic.progress import Steps
from laconic.tasks.chat_template import mark_completion
from train import reference_rows
from train.finetune.evaluator import Evaluator
from train.finetune.finetune import finetune
from train.objectives.choice import make_objective
from train.settings import TrainingRecipe
from train.step_assembly import make_step_parts

CHATML = (
    "{% for m in messages %}{{ m.role }} : {{ m.content }} ;\n{% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)
WORDS = ("hello", "world", "the", "model", "a", "b")
TEXTS = [
    {"prompt": f"{one} {other}", "chosen": f" {other} {one}" + " a" * (number % 3), "rejected": f" {one}"}
    for number, (one, other) in enumerate((one, other) for one in WORDS for other in WORDS if one != other)
]


HELD = [{"prompt": f"{word} {word}", "chosen": f" {word} {word}", "rejected": f" {word}"} for word in WORDS]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = models.save_llama(tmp_path_factory.mktemp("source") / "llama")
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


@pytest.fixture(scope="module")
def checkpoint(llama):
    return load_source(llama)


@pytest.fixture
def written(tmp_path):
    def write(rows):
        file = tmp_path / "d.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)))
        return file

    return write


@pytest.fixture
def tune(llama, written, tmp_path):
    def run(objective="dpo", rows=TEXTS, output="tuned", **changes):
        given = {
            "source": str(llama), "data": str(written(rows)), "objective": objective, "batch_size": 6, "steps": 4,
            "precision": "fp32", "optimizer": {"sgd": {"lr": 0.5}}, "schedule": "constant", "max_grad_norm": None,
            "loader": {"workers": 0}, "max_length": 32,
        }  # fmt: skip
        return finetune(TrainingRecipe.model_validate(given | changes), tmp_path / output, steps=Steps(quiet=True))

    return run


def turn(role, content):
    return {"role": role, "content": content}


def test_texts_and_chats_become_the_same_prompt_with_two_answers(checkpoint, written):
    question, good, bad = turn("user", "hello"), turn("assistant", "world"), turn("assistant", "a b")
    rows = [
        {"prompt": [question], "chosen": [good], "rejected": [bad]},
        {"chosen": [question, good], "rejected": [question, bad]},
        {"prompt": "user : hello ;\nassistant : ", "chosen": "world ;\n", "rejected": "a b ;\n"},
    ]
    dataset = read(written(rows), checkpoint.task)
    for pair in dataset.samples:
        assert (pair, pair.rejected) == ("user : hello ;\nassistant : world ;\n", "user : hello ;\nassistant : a b ;\n")
        for text in (pair.chosen, pair.rejected):
            assert [text[start:stop] for start, stop in text.answers] == [text[text.index("assistant : ") + 12 :]]
    again = pickle.loads(pickle.dumps(dataset.samples[0]))
    assert (again, again.rejected.answers) == (dataset.samples[0], dataset.samples[0].rejected.answers)
    other = read(written([rows[0] | {"rejected": [turn("assistant", "b")]}]), checkpoint.task)
    assert other.keys[0] != dataset.keys[0]


BAD = [
    ({"prompt": "a", "chosen": " b"}, "there is no 'rejected'"),
    ({"prompt": "a", "rejected": " b"}, "there is no 'chosen'"),
    ({"prompt": "a", "chosen": " b", "rejected": " b"}, "are the same, so that neither is preferred"),
    ({"prompt": "a", "chosen": " b", "rejected": ""}, "the 'rejected' is empty"),
    ({"chosen": " b", "rejected": " a"}, "expected a string under 'prompt'"),
    ({"prompt": "a", "chosen": [turn("assistant", "b")], "rejected": " a"}, "here they are str, list, str"),
    ({"chosen": [turn("user", "b")], "rejected": [turn("user", "a")]}, "no message has the role 'assistant'"),
]


@pytest.mark.parametrize(("row", "said"), BAD)
def test_a_row_that_is_no_preference_is_named_with_its_number(checkpoint, written, row, said):
    with pytest.raises(DataError, match=rf"d.jsonl, row 1: .*{said}"):
        read(written([row]), checkpoint.task)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "a " * 40, "chosen": "b", "rejected": "a"}, r"row \d of d.jsonl.*: the prompt fills the 32 tokens"),
        ({"prompt": "a", "chosen": " b" * 40 + " a", "rejected": " b" * 41}, "both answers are the same tokens"),
        ({"prompt": "a", "completion": " b"}, r"row \d of d.jsonl.* has no answers to prefer"),
    ],
)
def test_a_row_that_shows_no_preference_to_the_model_is_refused(tune, tmp_path, row, said):
    with pytest.raises(DataError, match=said):
        tune(rows=[row, *TEXTS[:9]])
    assert not list(tmp_path.glob("tuned*"))


def test_an_objective_that_is_unknown_or_of_another_task_is_refused(checkpoint, tmp_path):
    with pytest.raises(RecipeError, match=r"unknown preference loss 'dppo'. Did you mean 'dpo'"):
        make_objective(checkpoint.task, preference=NamedSettings(name="dppo"))
    with pytest.raises(RecipeError, match=r"beta"):
        make_objective(checkpoint.task, preference=NamedSettings(name="dpo", config={"beta": 0}))
    other = load_source(models.save_bert(tmp_path / "bert"))
    with pytest.raises(RecipeError, match="learned by language models, and this model is for text-"):
        make_objective(other.task, preference=NamedSettings(name="dpo"))


def answers_of(model, task, row):
    """The log-likelihoods of a row's answers, and how many tokens they have, one text at a time."""
    likelihoods, counts = [], []
    for answer in (row["chosen"], row["rejected"]):
        ((ids, learned),) = task.tokenize([mark_completion(row["prompt"], answer)])
        ids, learned = torch.tensor(ids), torch.tensor(learned)[1:]
        scores = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        likelihoods.append(scores[learned].sum())
        counts.append(int(learned.sum()))
    return torch.stack(likelihoods), torch.tensor(counts)


def plain_loss(name, beta, likelihoods, counts, reference):
    """The loss of a row as the papers write it."""
    if name == "dpo":
        chosen, rejected = beta * (likelihoods - reference)
        return -functional.logsigmoid(chosen - rejected)
    chance = (likelihoods / counts).exp()
    odds = chance / (1 - chance)
    return -chance[0].log() - beta * functional.logsigmoid((odds[0] / odds[1]).log())


def train_plainly(source, name, beta, steps):
    """The losses of a plain loop over all rows."""
    opened = load_source(source)
    model, task = opened.module.model.train().requires_grad_(True), opened.task
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with torch.no_grad():
        references = [answers_of(model, task, row)[0] for row in TEXTS]
    losses = []
    for _ in range(steps):
        pairs = zip(TEXTS, references, strict=True)
        rows = [plain_loss(name, beta, *answers_of(model, task, row), reference) for row, reference in pairs]
        loss = torch.stack(rows).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


TECHNIQUES = [
    {"gradient-accumulation": {"rows": 4}},
    "gradient-checkpointing",
    {"chunked-cross-entropy": {"chunk": 16}},
]


@pytest.mark.parametrize("name", ["dpo", "orpo"])
def test_losses_are_those_of_a_plain_loop(tune, llama, tmp_path, name):
    (tmp_path / "held.jsonl").write_text("\n".join(map(json.dumps, HELD)))
    data = {"train": str(tmp_path / "d.jsonl"), "evaluate": str(tmp_path / "held.jsonl")}
    expected = train_plainly(llama, name, 0.3, 4)
    assert expected[-1] < expected[0]
    for number, techniques in enumerate(([], TECHNIQUES)):
        found = tune({name: {"beta": 0.3}}, output=f"tuned{number}", data=data, batch_size=30, techniques=techniques)
        assert found.training.losses == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    "techniques",
    [[], ["lora"], ["bf16", {"lora": {"base_dtype": "bfloat16"}}, {"gradient-accumulation": {"rows": 2}}]],
    ids=str,
)
def test_a_model_that_has_learned_nothing_has_no_margin_and_one_that_has_prefers_what_it_is_shown(
    tune, tmp_path, techniques
):
    adam = {"adamw": {"lr": 0.01}}
    found = tune(techniques=techniques, optimizer=adam, steps=20, eval_every=10, best_by="reward margin", generate=1)
    assert list(found.before) == ["loss", "reward accuracy", "reward margin"]
    assert found.before == pytest.approx({"loss": math.log(2), "reward accuracy": 0.5, "reward margin": 0}, abs=1e-6)
    assert found.after["reward margin"] > 0.1
    assert found.after["reward accuracy"] == 1
    assert found.after["loss"] < 0.69
    saved = Checkpoint.load(tmp_path / "tuned")
    assert saved.history[-1].config["objective"] == {"name": "dpo", "config": {}}
    assert saved.history[-1].figures["reward margin after"] == found.after["reward margin"]
    assert not (tmp_path / "tuned" / "training" / reference_rows.REFERENCE).exists()


def test_odds_are_learned_without_a_reference(tune):
    found = tune("orpo", optimizer={"adamw": {"lr": 0.01}}, steps=20)
    assert list(found.after) == ["loss", "reward accuracy", "reward margin"]
    assert found.after["loss"] < 0.7 * found.before["loss"]


def test_an_interrupted_run_goes_on_with_the_reference_that_it_began_with(tune, monkeypatch):
    whole = tune(output="whole", techniques=["lora"], eval_every=1, snapshot_every=1)
    evaluate, calls = Evaluator._evaluate, []

    def interrupt(self, state, dataset):
        calls.append(dataset)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return evaluate(self, state, dataset)

    with monkeypatch.context() as change:
        change.setattr(Evaluator, "_evaluate", interrupt)
        with pytest.raises(KeyboardInterrupt):
            tune(techniques=["lora"], eval_every=1, snapshot_every=1)
    monkeypatch.setattr(reference_rows, "measure_rows", None)
    found = tune(techniques=["lora"], eval_every=1, snapshot_every=1)
    assert (found.training.losses, found.after) == (whole.training.losses, whole.after)


def train_on_rank(rank, folder):
    """A run of two ranks, whose last batch of an epoch has fewer pairs than they."""
    given = json.loads((folder / "recipe.json").read_text())
    found = finetune(TrainingRecipe.model_validate(given), folder / "two", steps=Steps(quiet=True))
    (folder / f"{rank}.json").write_text(json.dumps([found.training.losses, found.before, found.after]))


def test_two_ranks_learn_as_one_does(tune, llama, written, tmp_path, monkeypatch):
    given = {
        "source": str(llama), "data": str(written(TEXTS)), "objective": "dpo", "batch_size": 13, "steps": 4,
        "precision": "fp32", "loader": {"workers": 0}, "techniques": [{"gradient-accumulation": {"rows": 3}}],
    }  # fmt: skip
    (tmp_path / "recipe.json").write_text(json.dumps(given))
    alone = finetune(TrainingRecipe.model_validate(given), tmp_path / "one", steps=Steps(quiet=True))
    assert by_two_ranks(train_on_rank, tmp_path, monkeypatch) == [0, 0]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first[0] == pytest.approx(alone.training.losses, abs=1e-5)
    assert first[1:] == [pytest.approx(alone.before, abs=1e-5), pytest.approx(alone.after, abs=1e-5)]


def test_a_cut_model_is_refused_and_the_recipe_writes_what_it_reads(llama, checkpoint, tmp_path):
    given = {"source": str(llama), "data": "d.jsonl", "objective": {"orpo": {"beta": 0.2}}}
    recipe = TrainingRecipe.model_validate(given)
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    assert TrainingRecipe.load(tmp_path / "recipe.yaml").objective == recipe.objective
    objective = make_objective(checkpoint.task, preference=recipe.objective)
    with pytest.raises(RecipeError, match="mesh: preferences are learned by a whole model"):
        make_step_parts(
            checkpoint.module, objective, recipe.components(), torch.device("cpu"), tensor=cast(DeviceMesh, object())
        )
    deferring = NamedSettings(name="chunked-cross-entropy", config={"defer": True})
    components = recipe.with_techniques((deferring,)).components()
    with pytest.raises(RecipeError, match=r"cannot be deferred. Set defer: false"):
        make_step_parts(checkpoint.module, objective, components, torch.device("cpu"))


def test_the_longest_pair_is_what_memory_is_planned_for(tune, monkeypatch):
    lengths = []
    monkeypatch.setattr("train.finetune.finetune.report_costs", lambda *given: lengths.append(given[3]))
    tune(steps=1, rows=[{"prompt": "a", "chosen": " b" * 20, "rejected": " a"}, *TEXTS])
    assert lengths == [24]
