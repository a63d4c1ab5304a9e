"""The loss of a language model from its hidden states: the memory that it takes, simulated, and its time, measured.

    python benchmarks/losses.py [--rounds 12]

torch's cross_entropy and linear_cross_entropy beside Laconic's loss of all logits at once and in chunks. Memory is the
most beside the inputs, forward and backward pass, for 8,192 tokens of 2,048 features and a vocabulary of 50,257. Times
are the processor time of both passes in one thread, taken in turns, by torch's cross_entropy of the same round.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from results import Results, make_parser
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, linear_cross_entropy

from train.objectives.linear_cross_entropy import ChunkedLinearCrossEntropy
from train.objectives.next_token import whole_logits
from train.planner.memory_timeline import AllocationLog
from train.planner.simulate import AllocationTracker, make_fake_mode

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
GIB = 2**30
SIZES = (512, 4096, 192), (512, 32000, 256), (256, 50257, 768)
"""Tokens, words and features of what is timed."""


def torchs_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The loss as transformers computes it."""
    return cross_entropy(linear(hidden, weight).float(), targets, reduction="sum")


LOSSES: dict[str, Loss] = {
    "torch, `cross_entropy`": torchs_logits,
    "torch, `linear_cross_entropy`": lambda hidden, weight, targets: linear_cross_entropy(
        hidden, weight, targets, reduction="sum", options=nn.LinearCrossEntropyOptions()
    ),
    "Laconic, all logits": lambda hidden, weight, targets: whole_logits(hidden, weight, None, targets),
    "Laconic, `chunked-cross-entropy`": lambda hidden, weight, targets: ChunkedLinearCrossEntropy(512)(
        hidden, weight, None, targets
    ),
}


def simulate_peak(loss: Loss, dtype: torch.dtype) -> float:
    """The most GiB beside the inputs."""
    log = AllocationLog()
    with make_fake_mode(), AllocationTracker(log, torch.device("cpu")):
        hidden = torch.empty(8192, 2048, dtype=dtype, requires_grad=True)
        weight = torch.empty(50257, 2048, dtype=dtype, requires_grad=True)
        targets = torch.empty(8192, dtype=torch.int64)
        before = log.build_timeline().device[-1]
        found: Any = loss(hidden, weight, targets)
        found.backward()
    return float(log.build_timeline().peak() - before) / GIB


def time_losses(tokens: int, words: int, width: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of the processor of both passes, of each round."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).requires_grad_()
    weight = torch.randn(words, width, generator=generator).mul_(0.05).requires_grad_()
    targets = torch.randint(words, (tokens,), generator=generator)
    seconds: dict[str, list[float]] = {name: [] for name in LOSSES}
    for number in range(rounds + 1):
        for name, loss in LOSSES.items():
            begin = time.process_time()
            found: Any = loss(hidden, weight, targets) / tokens
            found.backward()
            if number:  # the first round touches memory for the first time
                seconds[name].append(time.process_time() - begin)
            hidden.grad = weight.grad = None
    return seconds


def main() -> None:
    """Simulate, measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    arguments = parser.parse_args()
    results = Results(publish=arguments.publish)
    torch.set_num_threads(1)
    dtypes = (torch.float32, torch.bfloat16)
    sizes = [[name, *(f"{simulate_peak(loss, dtype):.2f}" for dtype in dtypes)] for name, loss in LOSSES.items()]
    results.table("memory", ["loss", "GiB, FP32", "GiB, BF16"], sizes)
    times = [time_losses(*size, arguments.rounds) for size in SIZES]
    results.begin("time", ["loss", *(f"{words:,} words" for _, words, _ in SIZES)])
    for name in LOSSES:
        cells = []
        for each in times:
            first = next(iter(each.values()))
            low, middle, high = statistics.quantiles([a / b for a, b in zip(each[name], first, strict=True)], n=4)
            cells.append(f"{middle:.2f} x ({low:.2f} to {high:.2f})")
        results.add("time", [name, *cells])


if __name__ == "__main__":
    main()
