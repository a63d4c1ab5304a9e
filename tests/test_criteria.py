"""Every criterion of the registry scores each weight; the gradients that some of them need are correct."""

import pytest
import torch
from contexts import dataset_for
from models import Perceptron, ResidualNet, randomize, save_bert, save_embedder, save_gpt2
from tokenizers import processors
from torch import nn
from torch.nn.functional import cross_entropy

from compress.criteria.criterion import Criterion, LayerStatistics, collect_statistics
from compress.statistics.gradients import collect_gradients
from compress.statistics.layer_weights import weight_matrix
from compress.statistics.moments import Moments
from laconic import registry
from laconic.data.reader import make_dataset
from laconic.errors import DataError
from laconic.models.checkpoint import Checkpoint
from laconic.models.processors import plain_task
from laconic.models.signature import call
from laconic.models.source_loading import load_source

NAMES = sorted(registry.CRITERIA)


def named(name: str) -> Criterion:
    return registry.resolve("criterion", name)()


def checkpoint_of(module: nn.Module, task: str = "tensors") -> Checkpoint:
    randomize(module)
    return Checkpoint.of(module, plain_task(task, module.inputs, "a test"), outputs=(), source={"kind": "test"}, size=0)


def layers_of(module: nn.Module) -> list[str]:
    return [path for path, layer in module.named_modules() if isinstance(layer, (nn.Linear, nn.Conv2d))]


def moments_of(rows: torch.Tensor) -> Moments:
    return Moments(rows.T @ rows, rows.sum(dim=0), len(rows))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("make", [lambda: Perceptron([6, 5, 3]), ResidualNet], ids=["perceptron", "convolutions"])
def test_every_criterion_scores_every_weight_and_says_the_same_twice(name, make):
    checkpoint = checkpoint_of(make())
    paths, dataset = layers_of(checkpoint.module), dataset_for(checkpoint, 12)
    found = [
        collect_statistics(named(name), checkpoint.module, checkpoint.task, dataset, paths, seed=3) for _ in range(2)
    ]
    assert list(found[0]) == paths
    for path in paths:
        scores, again = (named(name).score(each[path]) for each in found)
        assert scores.shape == weight_matrix(checkpoint.module.get_submodule(path)).shape
        assert scores.dtype == torch.float32
        assert bool((scores >= 0).all())
        assert scores.isfinite().all()
        assert torch.equal(scores, again)
    assert not any(parameter.requires_grad for parameter in checkpoint.module.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_a_weight_that_is_zero_matters_least(name):
    weight = torch.tensor([[0.0, 1.0, -2.0]])
    rows = torch.tensor([[1.0, 2.0, 1.0], [2.0, -1.0, 1.0]])
    ones = torch.ones_like(weight)
    scores = named(name).score(LayerStatistics(weight, moments_of(rows), ones, ones))
    assert scores[0, 0] == 0
    assert scores[0, 1:].min() > 0


@pytest.mark.parametrize("name", [name for name in NAMES if "moments" in named(name).needs])
def test_a_weight_on_an_input_that_is_never_there_matters_least(name):
    rows = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    rows[:, 2] = 0
    scores = named(name).score(LayerStatistics(torch.ones(3, 4), moments_of(rows)))
    assert (scores.argmin(dim=1) == 2).all()


def test_sparsegpt_counts_what_is_lost_when_the_other_weights_make_up_for_it():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(400, 5, generator=generator)
    rows[:, 1:] += rows[:, :1]
    weight = torch.randn(1, 5, generator=generator)
    scores = named("sparsegpt").score(LayerStatistics(weight, moments_of(rows)))
    wanted = []
    for left in range(5):
        others = [index for index in range(5) if index != left]
        best = torch.linalg.lstsq(rows[:, others], rows @ weight.T).solution
        wanted.append(float((rows @ weight.T - rows[:, others] @ best).square().sum()))
    assert torch.allclose(scores[0], torch.tensor(wanted), rtol=0.1)


def test_without_labels_the_mean_square_is_the_diagonal_of_the_gauss_newton_matrix():
    checkpoint = checkpoint_of(Perceptron([4, 5, 3]))
    dataset = dataset_for(checkpoint, 3)
    (path, module) = ("layers.0", checkpoint.module)
    weight = module.get_parameter(f"{path}.weight")
    wanted = torch.zeros_like(weight)
    for sample in dataset.samples:
        given = torch.tensor(checkpoint.task.encode([sample])["x"])

        def answer(value, given=given):
            return torch.func.functional_call(module, {f"{path}.weight": value}, (given,))[0]

        wanted += torch.func.jacrev(answer)(weight.detach()).square().sum(dim=0) / len(dataset)
    found = sum(
        collect_gradients(module, checkpoint.task, dataset, [path], seed=seed)[path].square for seed in range(600)
    ) / 600  # fmt: skip
    assert torch.allclose(found, wanted, rtol=0.2, atol=1e-3 * float(wanted.max()))


def test_with_labels_the_gradient_is_that_of_the_tasks_objective():
    module = randomize(Perceptron([4, 3]))
    task = plain_task("tensors", module.inputs, "a test")
    samples = task.examples(6, 0)
    dataset = make_dataset(samples, task, labels=[0, 1, 2, 0, 1, 2], name="labelled")
    found = collect_gradients(module, task, dataset, ["layers.0"])["layers.0"]
    sizes = []
    for sample, label in zip(samples, dataset.labels, strict=True):
        given = {name: torch.tensor(array) for name, array in task.encode([sample]).items()}
        module.requires_grad_(True)
        loss = cross_entropy(call(module, given)["output"], torch.tensor([label]))
        sizes.append(torch.autograd.grad(loss, module.layers[0].weight)[0])
    assert torch.allclose(found.absolute, torch.stack(sizes).abs().mean(dim=0), atol=1e-6)
    assert torch.allclose(found.square, torch.stack(sizes).square().mean(dim=0), atol=1e-6)


@pytest.mark.parametrize("save", [save_bert, save_embedder, save_gpt2], ids=["likelihood", "answer", "next token"])
def test_transformers_without_labels_have_gradients(save, tmp_path):
    checkpoint = load_source(save(tmp_path / "model"))
    paths = [path for path, layer in checkpoint.module.named_modules() if type(layer).__name__ in ("Linear", "Conv1D")]
    paths = [path for path in paths if "lm_head" not in path][:4]
    found = collect_gradients(checkpoint.module, checkpoint.task, dataset_for(checkpoint, 4), paths)
    assert all(
        found[path].absolute.shape == weight_matrix(checkpoint.module.get_submodule(path)).shape for path in paths
    )
    assert all(float(each.square.max()) > 0 for each in found.values())


def test_texts_without_a_token_teach_a_language_model_nothing(tmp_path):
    checkpoint = load_source(save_gpt2(tmp_path / "model"))
    (path,) = [path for path, _ in checkpoint.module.named_modules() if path.endswith("h.0.mlp.c_fc")]
    checkpoint.task.tokenizer.post_processor = processors.Sequence([])
    for texts in ([""], ["", "hello"]):
        dataset = make_dataset(texts, checkpoint.task, name="short")
        if len(texts) == 1:
            with pytest.raises(DataError, match="two tokens"):
                collect_gradients(checkpoint.module, checkpoint.task, dataset, [path])
        else:
            assert collect_gradients(checkpoint.module, checkpoint.task, dataset, [path])[path].absolute.max() > 0
