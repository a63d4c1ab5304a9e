"""The precision of training, chosen by what the device was measured to gain from BF16."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from laconic.cache import Cache
from laconic.config import NamedSettings
from laconic.hardware import this_machine
from laconic.hashing import hash_of, library_digest
from laconic.progress import Steps
from train.device_clock import make_clock
from train.parallel.ranks import Ranks
from train.settings import Training
from train.step.technique import Technique

LEAST_GAIN = 1.2
"""BF16 is taken where it makes products faster by this factor: it rounds, and should not do so for nothing."""
LEAST_PARAMETERS = 1_000_000
"""A smaller model stays in FP32. One core of a Xeon with AMX: layers of 64 features gain 1.07, of 32 features 0.76, of
384 features 1.9."""
ROWS, WIDTH = 256, 384
"""Tokens and features of the layers that are timed: those of MiniLM. A turn takes 15 ms in FP32 on one core, and 330 ms
in BF16 on a core without it."""
TURNS = 3

T = TypeVar("T", bound=Training)


def settle_precision(training: T, module: nn.Module, ranks: Ranks, cache: Cache, steps: Steps) -> T:
    """Replace `precision: auto` in the settings by fp32 or bf16, and report the reason.

    A technique that sets the precision stands, and so does one that places the weights; where it computes in BF16 and
    the device is slower in it than in FP32, there is a warning. BF16 is taken where it is faster for every rank.
    """
    device, techniques = ranks.device, training.components().techniques
    low = [name for name, technique in techniques.items() if technique.multiplies_in_bf16]
    if low and (gain := measure_bf16_gain(device, cache)) < 1:
        steps.warn(
            f"{' and '.join(low)}: on {name_device(device)} matrix products in BF16 take {1 / gain:.1f} times as long "
            f"as in FP32. Leave {'it' if len(low) == 1 else 'them'} out, or set precision: auto, which takes the faster"
        )
    if training.precision != "auto":
        return training
    if any(sets_precision(technique) for technique in techniques.values()):
        return training.model_copy(update={"precision": "bf16" if low else "fp32"})
    count = sum(parameter.numel() for parameter in module.parameters())
    if count < LEAST_PARAMETERS:
        return training.model_copy(update={"precision": "fp32"})
    gain = measure_bf16_gain(device, cache)
    takes = not ranks.any(gain < LEAST_GAIN)
    ratio = f"are {gain:.2g} times as fast as" if gain > 1 else f"take {1 / gain:.2g} times as long as"
    steps.report(
        f"precision: {'bf16' if takes else 'fp32'}",
        f"matrix products in BF16 {ratio} in FP32, measured on {name_device(device)}",
    )
    if not takes:
        return training.model_copy(update={"precision": "fp32"})
    added = [NamedSettings(name="bf16")]
    has_attention = any(hasattr(part, "set_attn_implementation") for part in module.modules())
    slots = {technique.slot for technique in techniques.values()}
    if device.type == "cpu" and has_attention and "attention" not in slots:
        added.append(NamedSettings(name="sdpa", config={"float32": True}))  # the BF16 kernel is slow on a CPU
    return training.with_techniques((*training.techniques, *added), precision="bf16")


def sets_precision(technique: Technique) -> bool:
    """Return whether a technique decides itself in which precision the model computes."""
    return technique.slot == "precision" or technique.places_weights


def measure_bf16_gain(device: torch.device, cache: Cache) -> float:
    """Measure how many times as fast layers are trained in BF16 as in FP32 on a device. Measured once in a second or
    two, and cached for the machine."""
    key = hash_of("bf16 gain", 1, this_machine().model_dump(), name_device(device), library_digest())
    return float(cache.json(f"bf16-gain-{key}", lambda: time_layers(device)))


def name_device(device: torch.device) -> str:
    """Return the name of the processor or the GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else this_machine().processor


def time_layers(device: torch.device) -> float:
    """Time a forward and backward pass of two layers in FP32, over the time in BF16.

    On a CPU one thread is timed by its processor time, and both precisions in turns: in wall-clock time on a busy
    machine, with two threads, the same passes took 7 to 20 times as long, and their ratio was anything from 0.7 to 1.4.
    """
    layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)).to(device)
    inputs = torch.ones(ROWS, WIDTH, device=device)
    threads = torch.get_num_threads()
    best = {torch.float32: float("inf"), torch.bfloat16: float("inf")}
    torch.set_num_threads(1)
    try:
        for turn in range(1 + TURNS):
            for dtype in best:
                seconds = time_pass(layers, inputs, dtype, make_clock(device))
                best[dtype] = min(best[dtype], seconds) if turn else best[dtype]  # the first turn warms up
    finally:
        torch.set_num_threads(threads)
    return best[torch.float32] / best[torch.bfloat16]


def time_pass(layers: nn.Module, inputs: Tensor, dtype: torch.dtype, clock: Callable[[], float]) -> float:
    """Time a forward and backward pass under autocast to `dtype`, in seconds."""
    begin = clock()
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=dtype is torch.bfloat16, cache_enabled=False):
        loss = layers(inputs).float().square().mean()
    torch.autograd.grad(loss, list(layers.parameters()))
    return clock() - begin
