"""Supervised fine-tuning of language models: chats and completions, their answers alone, long documents in blocks."""

import json
import pickle
from itertools import pairwise

import models
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.data.reader import make_dataset, read
from laconic.errors import DataError, InputError, SourceError
from laconic.models.checkpoint import Checkpoint
from laconic.models.source_loading import load_source
from laconic.progress import Steps
from laconic.tasks.chat_template import ChatTemplate, MarkedText, mark_completion
from laconic.tasks.token_positions import IGNORED
from train.callbacks.journal import read_lines
from train.finetune.finetune import finetune
from train.memory.sequence_packing import PackedLayout
from train.objectives.next_token import LEARNED, NextToken, TokenizedText
from train.settings import TrainingRecipe
from train.step.objective import TARGETS

CHATML = (
    "{% for m in messages %}[CLS] {{ m.role }} {{ m.content }} [SEP]\n{% endfor %}"
    "{% if add_generation_prompt %}[CLS] assistant {% endif %}"
)
CHAT = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "world a"},
    {"role": "user", "content": "b"},
    {"role": "assistant", "content": "the model"},
]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    for name, save in (("gpt2", models.save_gpt2), ("llama", models.save_llama)):
        save(folder / name)
        file = folder / name / "tokenizer.json"
        tokenizer = json.loads(file.read_text())
        special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        tokenizer["added_tokens"] = [{"id": 2, "content": "[CLS]"} | special, {"id": 3, "content": "[SEP]"} | special]
        file.write_text(json.dumps(tokenizer))
        config = json.loads((folder / name / "tokenizer_config.json").read_text())
        config |= {"eos_token": "[SEP]", "bos_token": "[CLS]"}
        (folder / name / "tokenizer_config.json").write_text(json.dumps(config))
        (folder / name / "chat_template.jinja").write_text(CHATML)
    return folder


@pytest.fixture(scope="module")
def checkpoint(home):
    return load_source(home / "llama")


def words(task, ids):
    return [task.tokenizer.id_to_token(int(index)) for index in ids]


def learned(task, sample):
    ((ids, marks),) = task.tokenize([sample])
    return words(task, ids), words(task, ids[marks])


def test_a_chat_becomes_the_text_that_transformers_makes_of_it(home, checkpoint):
    own = transformers.AutoTokenizer.from_pretrained(home / "llama")
    text = checkpoint.task.mark_chat(CHAT)
    assert text == own.apply_chat_template(CHAT, tokenize=False)
    ((ids, _),) = checkpoint.task.tokenize([text])
    assert ids.tolist() == own.apply_chat_template(CHAT, tokenize=True, return_dict=False)
    assert checkpoint.task.encode([text])["input_ids"][0].tolist() == ids.tolist()[:-1]  # nothing follows the end


def test_answers_and_completions_are_learned_with_an_end_token_and_nothing_else(checkpoint):
    found, answers = learned(checkpoint.task, checkpoint.task.mark_chat(CHAT))
    assert found[:3] == ["[CLS]", "[UNK]", "hello"]
    assert answers == ["world", "a", "[SEP]", "the", "model", "[SEP]"]
    found, answers = learned(checkpoint.task, mark_completion("hello world", " a b"))
    assert found == ["[CLS]", "hello", "world", "a", "b", "[SEP]"]
    assert answers == ["a", "b", "[SEP]"]
    task = checkpoint.task
    before = task.tokenizer.post_processor
    task.tokenizer.post_processor = None
    try:
        assert learned(task, "a b") == (["a", "b", "[SEP]"],) * 2
        assert learned(task, mark_completion("a", " b"))[1] == ["b", "[SEP]"]
    finally:
        task.tokenizer.post_processor = before


@settings(max_examples=40)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=6), st.integers(3, 64))
def test_blocks_hold_each_token_of_the_documents_as_a_target_once(checkpoint, sizes, limit):
    task, rng = checkpoint.task, np.random.default_rng(len(sizes))
    texts = [" ".join(rng.choice(["a", "b", "hello"], size)) for size in sizes]
    whole = task.tokenize(texts)
    with task.truncated(limit):
        rows = NextToken(task).prepare_rows(make_dataset(texts, task, name="x"))
    assert all(1 < len(row) <= limit + 1 for row in rows.samples)
    for text, (ids, _) in zip(rows_by_text(rows), whole, strict=True):
        assert np.concatenate([row.ids[1:] for row in text]).tolist() == ids[1:].tolist()
        assert all(one.ids[-1] == other.ids[0] for one, other in pairwise(text))


def rows_by_text(rows):
    texts: list[list[TokenizedText]] = []
    for row in rows.samples:
        if row.ids[0] == 2:
            texts.append([])
        texts[-1].append(row)
    return texts


def test_a_chat_is_cut_and_left_out_where_no_answer_remains(checkpoint):
    task = checkpoint.task
    chats = [task.mark_chat(CHAT), task.mark_chat([{"role": "user", "content": "a " * 30}, CHAT[1]])]
    with task.truncated(10):
        rows = NextToken(task).prepare_rows(make_dataset(chats, task, name="x"))
        assert [len(row) for row in rows.samples] == [11]
        assert NextToken(task).prepare_rows(rows) is rows
        with pytest.raises(DataError, match=r"x: no text has a token to learn .* within 10 tokens"):
            NextToken(task).prepare_rows(make_dataset(chats[1:], task, name="x"))


@pytest.mark.parametrize("source", ["gpt2", "llama"])
def test_packed_answers_have_the_loss_and_the_gradient_of_each_alone(home, source):
    checkpoint = load_source(home / source)
    task, module = checkpoint.task, checkpoint.module.requires_grad_(True)
    samples = [task.mark_chat(CHAT), mark_completion("a b", " hello"), mark_completion("world", " a b a")]
    rows = NextToken(task).prepare_rows(make_dataset(samples, task, name="x"))
    losses, gradients = [], []
    for layout in (None, PackedLayout(48)):
        objective = NextToken(task)
        objective.layout = layout or objective.layout
        batch = objective.collate(list(rows.samples), None)
        assert objective.count_terms(batch) == sum(row.count for row in rows.samples) == int(batch[LEARNED].sum())
        assert int((batch[TARGETS] != IGNORED).sum()) == objective.count_terms(batch)
        assert len(batch["input_ids"]) == (1 if layout else 3)
        losses.append(objective.loss(module, batch))
        gradients.append(torch.autograd.grad(losses[-1], list(module.parameters())))
    alone = sum(float(objective_alone(task, module, row)) for row in rows.samples)
    assert [float(loss.detach()) for loss in losses] == pytest.approx([alone, alone], rel=1e-5)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def objective_alone(task, module, row):
    logits = module.model(torch.from_numpy(row.ids)[None, :-1]).logits[0]
    targets = torch.from_numpy(row.ids[1:])
    losses = torch.nn.functional.cross_entropy(logits.detach(), targets, reduction="none")
    return losses[torch.from_numpy(row.learned[1:])].sum()


TEMPLATES = {
    "raises": ("{{ raise_exception('only one turn') }}", "refuses the chat: only one turn"),
    "reaches out": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses the chat: .*unsafe"),
    "changes the chat": ("{{ messages.append(1) }}", "refuses the chat: .*unsafe|is not safely"),
    "does not read": ("{% for %}", "does not read"),
    "rewrites": (
        "{% for m in messages %}{{ m.content if loop.last else '' }}|{% endfor %}",
        "message 2 in another way where others follow",
    ),
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_a_template_that_does_not_render_a_chat_is_answered_in_one_sentence(case):
    text, said = TEMPLATES[case]
    with pytest.raises((InputError, SourceError), match=said):
        ChatTemplate(text, {}).mark(CHAT)


def test_the_same_chat_is_the_same_text_on_another_day_and_in_a_worker():
    text = "{{ strftime_now is defined }} {{ {'a': '<é>'} | tojson }} {{ eos_token }}"
    assert ChatTemplate(text, {"eos_token": "</s>"}).render(CHAT) == 'False {"a": "<é>"} </s>'
    text = MarkedText("a b", [(1, 3)], has_special_tokens=True)
    again = pickle.loads(pickle.dumps(text))
    assert (again, again.answers, again.has_special_tokens) == ("a b", ((1, 3),), True)


BAD = [
    ({"messages": "hello"}, "expected a list of objects"),
    ({"messages": [{"role": "user"}]}, "message 1 has no 'content'"),
    ({"messages": CHAT[:1]}, "no message has the role 'assistant'"),
    ({"prompt": "a", "completion": ""}, "'completion' is empty"),
    ({"completion": "a"}, "expected a string under 'prompt'"),
    ({"chat": []}, "there is no 'text'"),
]


@pytest.mark.parametrize(("row", "said"), BAD)
def test_a_row_that_is_no_chat_is_named_with_its_number(checkpoint, tmp_path, row, said):
    (tmp_path / "d.jsonl").write_text(json.dumps(row))
    with pytest.raises(DataError, match=rf"d.jsonl, row 1: .*{said}"):
        read(tmp_path / "d.jsonl", checkpoint.task)


def test_chats_are_read_from_parquet_too(checkpoint, tmp_path):
    pq.write_table(pa.table({"messages": [CHAT, CHAT[:2]], "source": ["x", "y"]}), tmp_path / "d.parquet")
    found = read(tmp_path / "d.parquet", checkpoint.task)
    assert found.samples[0] == checkpoint.task.mark_chat(CHAT)
    assert len(found.samples[1].answers) == 1


def tune(home, output, rows, **changes):
    file = output.with_suffix(".jsonl")
    file.write_text("\n".join(map(json.dumps, rows)))
    given = {
        "source": str(home / "gpt2"), "data": str(file), "batch_size": 8, "steps": 30, "precision": "fp32",
        "optimizer": {"adamw": {"lr": 0.01}}, "loader": {"workers": 0},
    }  # fmt: skip
    return finetune(TrainingRecipe.model_validate(given | changes), output, steps=Steps(quiet=True))


def test_a_model_learns_to_answer_and_keeps_the_template_of_chats(home, tmp_path):
    rows = [{"messages": [{"role": "user", "content": f"{a} {b}"}, {"role": "assistant", "content": f"{b} {a}"}]}
            for a in ("a", "b", "hello") for b in ("world", "the", "model")] * 4  # fmt: skip
    found = tune(home, tmp_path / "tuned", rows, techniques=["sequence-packing"], generate=2, eval_every=15, steps=60)
    answers = read_lines(tmp_path / "tuned" / "training" / "answers.jsonl")
    assert [line["step"] for line in answers] == [0, 0, 15, 15, 30, 30, 45, 45, 60, 60]
    given = answers[-1]["given"].split()
    assert answers[-1]["wanted"].split() == [*reversed(given[2:4]), "[SEP]"]
    assert len(answers[-1]["answer"].split()) == 2
    assert found.after["perplexity"] < 0.5 * found.before["perplexity"]
    task = Checkpoint.load(tmp_path / "tuned").task
    assert task.mark_chat(CHAT) == load_source(home / "gpt2").task.mark_chat(CHAT)
    assert task.end_id == 3


def test_a_template_is_given_where_the_model_has_none(home, tmp_path):
    models.save_gpt2(tmp_path / "bare")
    rows = [{"messages": CHAT}, {"messages": CHAT[:2]}]
    with pytest.raises(DataError, match=r"no chat template, .* data.chat_template"):
        tune(home, tmp_path / "tuned", rows, source=str(tmp_path / "bare"))
    (tmp_path / "own.jinja").write_text(CHATML)
    data = {"train": str(tmp_path / "tuned.jsonl"), "chat_template": str(tmp_path / "own.jinja")}
    tune(home, tmp_path / "tuned", rows, source=str(tmp_path / "bare"), data=data, steps=1)
    assert Checkpoint.load(tmp_path / "tuned").task.chat.text == CHATML
