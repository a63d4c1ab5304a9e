"""Does DeepSpeed's ZeRO give the losses and gradient norms of the training step here?

    pip install deepspeed
    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 benchmarks/deepspeed_zero.py

A transformer of three layers learns ten batches of five rows: two on the first rank, three on the second. By replicas
(DDP) through `train_step`, and by DeepSpeed's engine in stages 1 to 3, with one micro-batch and with a row in each;
gradients are clipped to 0.5. The first run compiles an operator of DeepSpeed, for which it needs g++.
"""

import importlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from train.objectives.array_targets import Targets
from train.optimizers.optimizer import parameter_groups
from train.parallel.mesh import Mesh
from train.parallel.ranks import Ranks, open_ranks
from train.settings import Training
from train.step.objective import Batch
from train.step.train_step import train_step
from train.step_assembly import distribute_step, make_step_parts

STEPS, ROWS, FIRST, CLIP = 10, 5, 2, 0.5
"""FIRST: rows of the first rank."""


class Classifier(nn.Module):
    """A transformer: [rows, tokens] int64 to [rows, 3]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(17, 8)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 15, dropout=0.0, batch_first=True) for _ in "abc")
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the scores of the classes."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(dim=1))  # type: ignore[no-any-return]


def make_training(accumulate: bool) -> Training:
    """Make the settings that both sides have."""
    techniques = [{"gradient-accumulation": {"rows": 1}}] if accumulate else []
    optimizer = {"adamw": {"lr": 1e-2}}
    content = {"batch_size": ROWS, "optimizer": optimizer, "max_grad_norm": CLIP, "techniques": techniques}
    return Training.model_validate(content)


def select_batch(step: int, rank: int) -> Batch:
    """Return the rows of this rank in a step."""
    generator = torch.Generator().manual_seed(step)
    ids, targets = torch.randint(17, (ROWS, 6), generator=generator), torch.randint(3, (ROWS,), generator=generator)
    part = slice(FIRST) if rank == 0 else slice(FIRST, None)
    return {"ids": ids[part], "targets": targets[part]}


def learn_here(ranks: Ranks, training: Training) -> list[tuple[float, float]]:
    """Learn by replicas, and return the loss and the norm of each step."""
    objective = Targets(None)  # type: ignore[arg-type]
    parts = make_step_parts(Classifier(), objective, training.components(), ranks.device)
    distribute_step(parts, training, ranks)
    state, figures = parts.assemble(), []
    for step in range(STEPS):
        loss = train_step(state, select_batch(step, ranks.rank), max_grad_norm=CLIP)
        assert loss is not None
        assert state.gradient_norm is not None
        figures.append((float(loss), float(state.gradient_norm)))
    return figures


def learn_by_deepspeed(ranks: Ranks, training: Training, stage: int) -> list[tuple[float, float]]:
    """Learn by DeepSpeed's engine, which averages gradients over the ranks and divides nothing by micro-batches."""
    deepspeed: Any = importlib.import_module("deepspeed")
    rows = training.components().micro_batch
    parts = ROWS - FIRST if rows else 1
    model = Classifier()
    components = training.components()
    groups = parameter_groups(model, components.optimizer.weight_decay)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": parts,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": CLIP,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=components.optimizer.build(groups), config=config)
    figures = []
    for step in range(STEPS):
        batch, total = select_batch(step, ranks.rank), torch.zeros(())
        for part in range(parts):
            # A rank with fewer rows takes as many micro-batches, of which the last has none.
            taken = {name: value[part : part + 1] if rows else value for name, value in batch.items()}
            engine.set_gradient_accumulation_boundary(part == parts - 1)
            loss = cross_entropy(engine(taken["ids"]), taken["targets"], reduction="sum") / (ROWS / ranks.world)
            engine.backward(loss, scale_wrt_gas=False)
            total += loss.detach()
        engine.step()
        figures.append((float(ranks.average(total)), float(engine.get_global_grad_norm())))
    engine.destroy()
    return figures


def main() -> None:
    """Measure, and print on the first rank."""
    with open_ranks(torch.device("cpu"), Mesh()) as ranks:
        for accumulate in (False, True):
            training = make_training(accumulate)
            expected = torch.tensor(learn_here(ranks, training))
            for stage in (1, 2, 3):
                difference = (torch.tensor(learn_by_deepspeed(ranks, training, stage)) - expected).abs().amax(dim=0)
                if ranks.is_first:
                    print(
                        f"ZeRO {stage}, {'a row in a micro-batch' if accumulate else 'one micro-batch'}: losses differ "
                        f"by at most {difference[0]:.1e}, norms by {difference[1]:.1e}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
