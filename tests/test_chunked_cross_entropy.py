"""The loss over a vocabulary in chunks: the same loss, the same gradients, without the logits."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from laconic.errors import RecipeError, TrainingFailure
from laconic.tasks.token_positions import IGNORED
from train.memory.chunked_cross_entropy import find_tied_embeddings
from train.objectives.deferred_gradient import DeferredLinearCrossEntropy
from train.objectives.linear_cross_entropy import ChunkedLinearCrossEntropy
from train.objectives.logit_gradients import sum_cross_entropy
from train.objectives.next_token import whole_logits
from train.planner.memory_timeline import AllocationLog
from train.planner.simulate import AllocationTracker, make_fake_mode

TOKENS, WIDTH, WORDS = 23, 8, 50


def case(dtype: torch.dtype = torch.float32, bias: bool = True) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, WIDTH, generator=generator).to(dtype) for rows in (TOKENS, WORDS))
    targets = torch.randint(0, WORDS, (TOKENS,), generator=generator)
    targets[[3, 7, 22]] = IGNORED
    extra = torch.randn(WORDS, generator=generator).to(dtype).requires_grad_() if bias else None
    return hidden.requires_grad_(), weight.requires_grad_(), extra, targets


def gradients(loss: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    (loss / 7).backward()
    return [one.grad for one in tensors if one is not None]


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("chunk", [1, 5, 23, 1000])
def test_loss_and_gradients_are_those_of_all_logits_at_once(chunk, bias, cap):
    found, wanted = case(bias=bias), case(bias=bias)
    a, b = ChunkedLinearCrossEntropy(chunk)(*found, cap), whole_logits(*wanted, cap)
    assert a.dtype is torch.float32
    torch.testing.assert_close(a, b)
    for one, other in zip(gradients(a, *found[:3]), gradients(b, *wanted[:3]), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_of_all_logits_and_its_gradients_are_those_of_torch(dtype):
    found, wanted = case(dtype), case(dtype)
    a = whole_logits(*found)
    b = functional.cross_entropy(
        functional.linear(*wanted[:3]).float(), wanted[3], ignore_index=IGNORED, reduction="sum"
    )
    assert a.dtype is torch.float32
    torch.testing.assert_close(a, b)
    for one, other in zip(gradients(a, *found[:3]), gradients(b, *wanted[:3]), strict=True):
        torch.testing.assert_close(one, other)


def test_logits_that_their_own_gradient_needs_are_not_overwritten_unseen():
    """A sigmoid's gradient is computed from its result."""
    hidden, weight, bias, targets = case()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sum_cross_entropy(functional.linear(hidden, weight, bias).sigmoid(), targets).backward()


def test_the_gradient_of_weights_in_bf16_adds_up_in_float32():
    exact, low = case(), case(torch.bfloat16)
    wide = tuple(None if one is None else one.detach().float().requires_grad_() for one in low[:3])
    found = gradients(ChunkedLinearCrossEntropy(1)(*low), *low[:3])
    wanted = gradients(whole_logits(*wide, exact[3]), *wide)
    assert found[1].dtype is torch.bfloat16
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.float(), other, atol=5e-3, rtol=2e-2)


def test_autocast_says_the_precision_of_products():
    found, wanted = case(), case()
    with torch.autocast("cpu", torch.bfloat16):
        a = ChunkedLinearCrossEntropy(5)(*found)
    b = whole_logits(*wanted)
    assert a.dtype is torch.float32
    assert not torch.equal(a, b)
    torch.testing.assert_close(a, b, rtol=0.01, atol=0.0)
    for one, other in zip(gradients(a, *found[:3]), gradients(b, *wanted[:3]), strict=True):
        assert one.dtype is torch.float32
        torch.testing.assert_close(one, other, atol=5e-3, rtol=5e-2)


def test_only_what_learns_has_a_gradient_and_ignored_targets_give_nothing():
    hidden, weight, bias, targets = case()
    ChunkedLinearCrossEntropy(5)(hidden, weight.detach(), None, targets).backward()
    assert hidden.grad is not None
    with torch.no_grad():
        assert not ChunkedLinearCrossEntropy(5)(hidden, weight, bias, targets).requires_grad
    hidden, weight, bias, targets = case()
    loss = ChunkedLinearCrossEntropy(5)(hidden, weight, bias, torch.full_like(targets, IGNORED))
    loss.backward()
    assert loss.item() == 0
    assert not weight.grad.any()


@pytest.mark.parametrize("loss", [ChunkedLinearCrossEntropy(5), whole_logits], ids=["chunks", "all logits"])
def test_a_second_backward_pass_is_refused(loss):
    loss = loss(*case())
    loss.backward(retain_graph=True)
    with pytest.raises(TrainingFailure, match="taken twice"):
        loss.backward()


def peak(loss, tokens: int, words: int, width: int, dtype: torch.dtype) -> int:
    """The most bytes beside the inputs, imagined."""
    log = AllocationLog()
    with make_fake_mode(), AllocationTracker(log, torch.device("cpu")):
        hidden = torch.empty(tokens, width, dtype=dtype, requires_grad=True)
        weight = torch.empty(words, width, dtype=dtype, requires_grad=True)
        targets = torch.empty(tokens, dtype=torch.int64)
        before = log.build_timeline().device[-1]
        loss(hidden, weight, None, targets).backward()
    return int(log.build_timeline().peak() - before)


def torchs(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    options = nn.LinearCrossEntropyOptions()
    return functional.linear_cross_entropy(hidden, weight, targets, reduction="sum", options=options)


def torchs_of_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(hidden, weight, bias).float(), targets, reduction="sum")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_takes_less_than_torchs_own_and_far_less_than_all_logits(dtype):
    size = 8192, 50257, 2048, dtype
    own, whole = peak(ChunkedLinearCrossEntropy(512), *size), peak(whole_logits, *size)
    assert own < whole / 3
    assert whole < peak(torchs_of_logits, *size) * 0.6
    if dtype is torch.float32:
        assert own < peak(torchs, *size)


def test_few_tokens_are_not_split_and_take_no_more_than_all_logits():
    size = 512, 4096, 192, torch.float32
    assert peak(ChunkedLinearCrossEntropy(512), *size) == peak(whole_logits, *size)


class Model(nn.Module):
    """A table of words that is used again as the head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(self.table(ids)).tanh()


def trained(
    loss, ids: Tensor, targets: Tensor, deferred: DeferredLinearCrossEntropy | None = None, autocast: bool = False
) -> Model:
    torch.manual_seed(0)
    model = Model()
    if deferred:
        model.table.forward = deferred.make_embedding_forward(model.table)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        (loss(model(ids), model.head.weight, model.head.bias, targets) / 3).backward()
    return model


@pytest.mark.parametrize("cap", [None, 0.5])
@pytest.mark.parametrize("chunk", [1, 5, 100])
def test_a_deferred_gradient_is_the_same_gradient(chunk, cap):
    *_, targets = case()
    ids = torch.arange(TOKENS) % 7
    deferred = DeferredLinearCrossEntropy(chunk)
    own, whole = (partial(loss, cap=cap) for loss in (deferred, whole_logits))
    found, wanted = trained(own, ids, targets, deferred), trained(whole, ids, targets)
    for one, other in zip(found.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-6, rtol=1e-5)
    assert not deferred.pending


def test_a_deferred_gradient_comes_last_and_is_not_lost_in_silence():
    *_, targets = case()
    order: list[str] = []
    model, deferred = Model(), DeferredLinearCrossEntropy(5)
    model.table.forward = deferred.make_embedding_forward(model.table)
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    deferred(model(torch.arange(TOKENS)), model.head.weight, model.head.bias, targets).backward()
    assert order[-1] == "table.weight"
    hidden, weight, bias, targets = case()
    deferred = DeferredLinearCrossEntropy(5)
    deferred(hidden, weight, bias, targets).backward()
    with pytest.raises(TrainingFailure, match="Set defer: false"):
        deferred(hidden, weight, bias, targets)


def test_only_a_head_that_shares_its_weights_can_be_deferred():
    assert [type(one) for one in find_tied_embeddings(Model())] == [nn.Embedding]
    untied = Model()
    untied.head.weight = nn.Parameter(untied.head.weight.clone())
    with pytest.raises(RecipeError, match="weights of its own"):
        find_tied_embeddings(untied)
    scaled = Model()
    scaled.table.max_norm = 1.0
    with pytest.raises(RecipeError, match="not a plain embedding"):
        find_tied_embeddings(scaled)
