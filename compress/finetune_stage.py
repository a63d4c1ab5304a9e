"""Fine-tuning as a stage of a recipe of compression, and as a step of a checkpoint's history."""

import copy
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import nn

from laconic.artifacts.record import Record
from laconic.models.checkpoint import Checkpoint
from laconic.recipes.stage import Property, TorchContext, TorchStage
from train.callbacks.run_estimate import format_estimate
from train.observers import ObserverSettings
from train.parallel.ranks import Ranks
from train.settings import Training
from train.trainer import train


class Finetune(Training, TorchStage):
    """Train on the samples for learning, as `laconic finetune` does on a file, with labels where the task needs any."""

    breaks: ClassVar[frozenset[Property]] = frozenset({"ranges"})
    trains = True
    teaches = True

    precision: Literal["auto", "fp32", "bf16"] = "auto"

    def apply(self, checkpoint: Checkpoint, context: TorchContext) -> Checkpoint:
        # What is trained is changed in place, and the original is still to be asked.
        copied = replace(checkpoint, module=copy.deepcopy(checkpoint.module))

        def report_pace(seconds: float, left: int) -> None:
            context.steps.report("estimated time", format_estimate(seconds, left))

        taught = train(
            copied,
            context.train,
            self,
            context.work,
            ranks=Ranks(device=torch.device("cuda" if torch.cuda.is_available() else "cpu")),
            observers=ObserverSettings(quiet=True, report_pace=report_pace),
            cache=context.cache,
        )
        record = self.make_record("finetune", checkpoint, context, {"last loss": taught.last_loss})
        return checkpoint.after(record, taught.module)

    @staticmethod
    def rebuild(module: nn.Module, record: Record) -> None:
        """Do nothing: training changes no structure."""
