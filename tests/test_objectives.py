"""What a model is taught: the right loss for the data, the same mean however a batch is cut, nothing without labels."""

import artifacts
import models
import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

from laconic import registry
from laconic.data.reader import make_dataset, read
from laconic.errors import DataError
from laconic.models.checkpoint import BUILD
from laconic.models.source_loading import load_source
from laconic.tasks.tensors import Tensors
from laconic.tasks.token_positions import IGNORED
from laconic.tensor import TensorSpec
from train.objectives.array_targets import Targets
from train.objectives.cross_entropy import CrossEntropy
from train.objectives.next_token import NextToken
from train.objectives.text_embeddings import Contrastive, CoSent, Ranking
from train.planner.simulate import fakify, simulate
from train.step.objective import TARGETS
from train.step.step_parts import StepParts

TEXTS = ["hello world", "the model answers every question about its weights", "a b", "while every request waits"]
SAVED = {
    "text-embedding": models.save_embedder,
    "text-classification": models.save_bert,
    "image-classification": models.save_vit,
    "text-generation": models.save_gpt2,
}
X = TensorSpec(name="x", dtype="float32", shape=("batch", 4))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    made = {}

    def get(task):
        if task not in made:
            made[task] = load_source(SAVED[task](tmp_path_factory.mktemp(task) / "source"))
        return made[task]

    return get


class Fixed(torch.nn.Module):
    """Answers with what it holds, whatever is asked."""

    def __init__(self, *answers):
        super().__init__()
        self.answers = answers

    def forward(self, **inputs):
        return self.answers


def fixed(*answers):
    module = Fixed(*answers)
    module.forward = lambda *inputs, **named: answers
    return module


def dataset(tmp_path, task, text):
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    return read(path, task)


# Every task


def objective_class(name):
    return registry.resolve("objective", registry.resolve("task", name).objective)


@pytest.mark.parametrize("name", registry.TASKS)
def test_every_task_has_an_objective(name):
    assert callable(objective_class(name).of)


@pytest.mark.parametrize("name", SAVED)
def test_a_step_on_an_example_is_simulated_without_a_value(checkpoint, name):
    found = checkpoint(name)
    objective = objective_class(name).of(found.task)
    real = objective.make_example(3, 12)
    rows = {len(tensor) for tensor in real.values()}
    assert rows == {6 if name == "text-embedding" else 3}
    assert "attention_mask" not in real or real["attention_mask"].all()
    module = BUILD[found.source["kind"]](found.source).train().requires_grad_(True)

    def prepare():
        parts = StepParts(
            fakify(module),
            objective,
            lambda groups: torch.optim.SGD(groups, lr=0.1),
            lambda module: [{"params": list(module.parameters())}],
        )
        return parts.assemble(), objective.make_example(3, 12)

    assert simulate(prepare).peak() > 0


@pytest.mark.parametrize("name", ["text-classification", "image-classification", "tensors", "text-embedding"])
def test_samples_without_labels_teach_nothing(checkpoint, name):
    task = Tensors((X,)) if name == "tensors" else checkpoint(name).task
    kinds = {"text-embedding": Contrastive}
    objective = kinds.get(name, objective_class(name))(task)
    with pytest.raises(DataError, match="no labels"):
        objective.collate(task.examples(2), None)


def mean_and_gradient(objective, module, batch, rows):
    module.requires_grad_(True).zero_grad()
    parts = objective.split(batch, rows)
    total = sum(objective.count_terms(part) for part in parts)
    loss = sum(objective.loss(module, part) / total for part in parts)
    loss.backward()
    gradient = torch.cat([each.grad.flatten() for each in module.parameters() if each.grad is not None])
    return loss.item(), gradient


@pytest.mark.parametrize("name", ["text-classification", "text-generation"])
def test_a_batch_in_parts_has_the_same_mean_and_gradient(checkpoint, name):
    found = checkpoint(name)
    objective = objective_class(name).of(found.task)
    batch = objective.collate(TEXTS, [0, 1, 2, 0] if name == "text-classification" else None)
    whole, gradient = mean_and_gradient(objective, found.module, batch, None)
    parts, other = mean_and_gradient(objective, found.module, batch, 3)
    assert parts == pytest.approx(whole, rel=1e-6)
    torch.testing.assert_close(other, gradient, atol=1e-6, rtol=1e-4)


# Classification and tensors


def test_classes_are_learned_by_cross_entropy_and_other_numbers_by_their_square_where_labels_fit(checkpoint):
    found = checkpoint("text-classification")
    objective = CrossEntropy(found.task)
    batch = objective.collate(TEXTS, [0, 2, 1, 1])
    logits = found.module(**{name: tensor for name, tensor in batch.items() if name != TARGETS})
    expected = cross_entropy(logits, torch.tensor([0, 2, 1, 1]), reduction="sum")
    torch.testing.assert_close(objective.loss(found.module, batch), expected)
    assert objective.count_terms(batch) == 4
    assert objective.count_tokens(batch) == sum(len(found.task.tokenizer.encode(text).ids) for text in TEXTS)
    objective, logits = Targets(Tensors((X,))), torch.tensor([[1.0, 2.0], [0.0, 3.0]])
    samples = [{"x": np.zeros(4, np.float32)}] * 2
    classes = objective.collate(samples, [1, 0])
    expected = cross_entropy(logits, torch.tensor([1, 0]), reduction="sum")
    torch.testing.assert_close(objective.loss(fixed(logits, None), classes), expected)
    numbers = objective.collate(samples, [[1.0, 1.0], [0.0, 0.0]])
    assert objective.loss(fixed(logits), numbers) == pytest.approx(0.5 + 4.5)
    assert objective.count_terms(numbers) == 2
    single = objective.collate(samples, [0.5, 1.0])
    assert objective.loss(fixed(torch.tensor([[1.5], [1.0]])), single) == pytest.approx(1)
    objective, samples = Targets(Tensors((X,))), [{"x": np.zeros(4, np.float32)}] * 2
    with pytest.raises(DataError, match="a label holds 3 numbers, an answer 2"):
        objective.loss(fixed(torch.zeros(2, 2)), objective.collate(samples, [[0.5] * 3] * 2))
    with pytest.raises(DataError, match="one per row"):
        objective.loss(fixed(torch.zeros(2, 2)), objective.collate(samples, [[1, 0]] * 2))
    with pytest.raises(DataError, match="label -1 is no class"):
        objective.collate(samples, [0, -1])


def test_an_example_has_labels_like_those_of_the_data():
    task = Tensors((X,))
    samples = [{"x": np.full(4, number, np.float32)} for number in range(3)]
    numbers = make_dataset(samples, task, labels=[[0.5, 1.5]] * 3)
    assert Targets.of(task, numbers).make_example(5, 1)[TARGETS].shape == (5, 2)
    classes = make_dataset(samples, task, labels=[0, 1, 2])
    assert Targets.of(task, classes).make_example(5, 1)[TARGETS].dtype == torch.int64


# Language models


def test_each_next_token_is_a_term(checkpoint):
    found = checkpoint("text-generation")
    objective = NextToken.of(found.task)
    batch = objective.collate(TEXTS, None)
    lengths = [len(found.task.tokenizer.encode(text).ids) for text in TEXTS]
    assert objective.count_terms(batch) == objective.count_tokens(batch) == sum(lengths) - 4
    assert batch["input_ids"].shape == (4, max(lengths) - 1)
    assert int((batch[TARGETS] != IGNORED).sum()) == objective.count_terms(batch)
    expected = 0.0
    for text in TEXTS:
        ids = torch.tensor([found.task.tokenizer.encode(text).ids])
        expected += found.module.model(input_ids=ids, labels=ids).loss * (ids.shape[1] - 1)
    torch.testing.assert_close(objective.loss(found.module, batch), expected)
    objective = NextToken.of(checkpoint("text-generation").task)
    batch = objective.collate(["a b", "b a"], None)
    assert batch.keys() == {"input_ids", TARGETS}
    assert objective.count_terms(batch) == 6
    task = checkpoint("text-generation").task
    task.tokenizer.post_processor, kept = None, task.tokenizer.post_processor
    try:
        with pytest.raises(DataError, match="two tokens"):
            NextToken.of(task).collate(["", ""], None)
        assert NextToken.of(task).count_terms(NextToken.of(task).collate(["", "a b"], None)) == 2
    finally:
        task.tokenizer.post_processor = kept


def test_the_loss_from_hidden_states_can_be_replaced(checkpoint):
    found = checkpoint("text-generation")
    objective, seen = NextToken.of(found.task), []

    def spy(hidden, weight, bias, targets, cap):
        seen.append((tuple(hidden.shape), tuple(weight.shape), bias, targets.dtype, cap))
        return hidden.sum()

    objective.cross_entropy = spy
    objective.loss(found.module, objective.make_example(2, 8))
    assert seen == [((16, 32), (40, 32), None, torch.int64, None)]


# Embeddings


def test_the_data_say_how_an_embedding_is_taught(checkpoint, tmp_path):
    task = checkpoint("text-embedding").task

    def kind(*rows):
        return type(registry.resolve("objective", task.objective).of(task, dataset(tmp_path, task, "\n".join(rows))))

    pair = '{"text1": "a %s", "text2": "b %s", "score": %s}'
    assert kind(pair % (1, 1, 0.5), pair % (2, 2, 4)) is CoSent
    assert kind(pair % (1, 1, 1), pair % (2, 2, 1)) is Ranking
    assert kind('{"text1": "a", "text2": "b"}', '{"text1": "c", "text2": "d"}') is Ranking
    assert kind('{"text": "a", "label": "x"}', '{"text": "b", "label": "y"}') is Contrastive
    with pytest.raises(DataError, match=r"score 0\.5: none is more alike"):
        kind(pair % (1, 1, 0.5), pair % (2, 2, 0.5))
    with pytest.raises(DataError, match="single samples without labels"):
        kind('{"text": "a"}')
    with pytest.raises(DataError, match="have the label 'x'"):
        kind('{"text": "a", "label": "x"}', '{"text": "b", "label": "x"}')


def vectors(*rows):
    return normalize(torch.tensor(rows, dtype=torch.float32), dim=-1)


def test_cosines_are_put_into_the_order_of_the_scores_and_equal_ones_into_none():
    objective = CoSent(artifacts.embedding_task())
    batch = objective.collate(["a", "b", "a", "c", "b", "c"], [0.9, 0.9, 0.1, 0.1, 0.1, 0.1])
    ordered = vectors([1, 0], [1, 0.1], [1, 0], [0, 1], [1, 0], [0.1, 1])
    reversed_ = vectors([1, 0], [0, 1], [1, 0], [1, 0.1], [1, 0], [1, 0])
    assert objective.count_terms(batch) == 3
    assert not objective.splittable
    low, high = (float(objective.loss(fixed(each), batch)) for each in (ordered, reversed_))
    cosines = [float(reversed_[index] @ reversed_[index + 1]) for index in (0, 2, 4)]
    expected = np.log1p(sum(np.exp(20 * (cosine - cosines[0])) for cosine in cosines[1:]))
    assert high / 3 == pytest.approx(expected, rel=1e-5)
    assert low < 1e-4
    objective = CoSent(artifacts.embedding_task())
    batch = objective.collate(["a", "b", "a", "c"], [0.3] * 4)
    states = vectors([1, 0], [0, 1], [1, 0], [1, 0]).requires_grad_()
    loss = objective.loss(fixed(states), batch)
    assert loss.item() == 0
    loss.backward()


def test_each_text_finds_its_own_among_the_others_and_texts_of_a_class_come_together():
    objective = Ranking(artifacts.embedding_task())
    batch = objective.collate(["a", "b", "c", "d"], None)
    states = vectors([1, 0], [1, 0.2], [0, 1], [0.3, 1])
    expected = cross_entropy(states[0::2] @ states[1::2].T * 20, torch.arange(2), reduction="sum")
    torch.testing.assert_close(objective.loss(fixed(states), batch), expected)
    assert objective.count_terms(batch) == 2
    twins = objective.collate(["a", "b", "c", "b"], None)
    assert float(objective.loss(fixed(vectors([1, 0], [0, 1], [0, 1], [0, 1])), twins)) == 0
    objective = Contrastive(artifacts.embedding_task())
    batch = objective.collate(["a", "b", "c"], ["x", "x", "y"])
    states = vectors([1, 0], [1, 0.5], [0, 1])
    likely = (states @ states.T / 0.05).fill_diagonal_(-torch.inf).log_softmax(-1)
    torch.testing.assert_close(objective.loss(fixed(states), batch), -(likely[0, 1] + likely[1, 0]))
    lonely = objective.collate(["a", "b", "c"], ["x", "y", "z"])
    trained = states.clone().requires_grad_()
    loss = objective.loss(fixed(trained), lonely)
    loss.backward()
    assert loss.item() == 0
    assert trained.grad.isfinite().all()
