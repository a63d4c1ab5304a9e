"""AdamW with moments in 8 or 4 bits, quantized in blocks."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from train.offload.chunked_loops import chunks
from train.optimizers.adamw import AdamSettings, adamw
from train.optimizers.codebook import Codebook, least
from train.optimizers.optimizer import Groups
from train.optimizers.parameterwise import ParameterWise, State, local, zeros

SMALLEST = 4096
"""Values below which a tensor's moments stay in FP32, as in bitsandbytes and torchao."""
PIECE = 1 << 20
"""Values stepped at a time: decoding, stepping and encoding take some 20 bytes of scratch for each."""


class AdamW8bit(AdamSettings):
    """AdamW with moments in 8 bits, a scale for every 256 values: 2.03 bytes of state per parameter."""

    library: ClassVar[str | None] = "torchao"
    dtensor: ClassVar[bool] = True
    bits: ClassVar[int] = 8

    def model_post_init(self, context: Any) -> None:
        """Work out the codes now: in a simulation it would be too late."""
        for signed in (True, False):
            least(self.bits, signed=signed)

    def build(self, groups: Groups) -> torch.optim.Optimizer:
        settings = self.model_dump(exclude={"stochastic_rounding"})
        return LowBitAdamW(groups, settings, bits=self.bits, stochastic_rounding=self.stochastic_rounding)


class AdamW4bit(AdamW8bit):
    """AdamW with moments in 4 bits, a scale for every 128 values: 1.06 bytes of state per parameter."""

    bits: ClassVar[int] = 4
    caution: ClassVar[str | None] = (
        "adamw-4bit learns more slowly: after 60 steps of fine-tuning MiniLM its loss was 0.10 behind AdamW's, "
        "which five seeds move by 0.05; adamw-8bit was not behind"
    )


class LowBitAdamW(ParameterWise):
    """AdamW in FP32 on moments that are decoded, moved and encoded again, a piece at a time.

    The codes are torchao's. Its own optimizer takes a parameter whole, and counts on torch.compile to keep the scratch
    of that out of memory: which needs a compiler, and took 7 to 24 seconds for each shape on two cores. This one gives
    the same weights, and runs as it is on fake tensors.
    A moment is codes [rows, n] uint8 and scales [rows, n / block] float32: the rows are the parameter's, so that both
    are sharded as it is, or one where a row is no multiple of a block.
    """

    sharded = True

    def __init__(self, groups: Groups, defaults: dict[str, Any], *, bits: int, stochastic_rounding: bool) -> None:
        self.books = {"exp_avg": Codebook(bits, signed=True), "exp_avg_sq": Codebook(bits, signed=False)}
        super().__init__(groups, defaults, stochastic_rounding=stochastic_rounding)

    def start(self, parameter: Tensor, group: State) -> State:
        state: State = {}
        for name, book in self.books.items():
            rows = parameter.shape[0] if parameter.ndim else 1
            if (parameter.numel() // rows) % book.block and not isinstance(parameter, DTensor):
                rows = 1
            width = parameter.numel() // rows
            if parameter.numel() < SMALLEST or width % book.block:
                state[name] = zeros(parameter)
            else:
                state[name] = table(parameter, rows, width * book.bits // 8, torch.uint8)
                state[f"{name}_scale"] = table(parameter, rows, width // book.block, torch.float32)
        return state

    def update(self, weight: Tensor, grad: Tensor, state: State, group: State) -> None:
        if "exp_avg_scale" not in state:
            adamw(weight, grad, state["exp_avg"], state["exp_avg_sq"], state["step"], group)
            return
        flat = weight.reshape(-1)
        names = [name for book in self.books for name in (book, f"{book}_scale")]
        tensors = {name: state[name].view(-1) for name in names}
        tensors |= {"weight": flat, "grad": grad.reshape(-1)}
        for chunk in chunks(flat.numel(), PIECE):
            self._step_piece({name: piece(value, chunk, flat.numel()) for name, value in tensors.items()}, state, group)
        if not weight.is_contiguous():
            weight.copy_(flat.view(weight.shape))

    def _step_piece(self, parts: dict[str, Tensor], state: State, group: State) -> None:
        mean, square = (book.decode(parts[name], parts[f"{name}_scale"]) for name, book in self.books.items())
        adamw(parts["weight"], parts["grad"], mean, square, state["step"], group)
        for (name, book), value in zip(self.books.items(), (mean, square), strict=True):
            book.encode(value, parts[name], parts[f"{name}_scale"])


def piece(values: Tensor, chunk: slice, total: int) -> Tensor:
    """Cut out what belongs to a chunk of `total` parameters, of a tensor that holds a share for each."""
    return values[chunk.start * len(values) // total : chunk.stop * len(values) // total]


def table(parameter: Tensor, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Make zeros [rows, width], sharded by rows where the parameter is."""
    if not isinstance(parameter, DTensor):
        return torch.zeros(rows, width, dtype=dtype, device=parameter.device)
    shard = local(parameter)
    return DTensor.from_local(
        torch.zeros(shard.shape[0], width, dtype=dtype, device=shard.device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=torch.Size([rows, width]),
        stride=(width, 1),
    )
