"""An observer that writes the figures of a training run for TensorBoard."""

from dataclasses import asdict
from pathlib import Path

from laconic.registry import missing_package
from train.callbacks.callback import RunLog, StepReport
from train.callbacks.monitor import StepMeter


class TensorBoard(RunLog):
    """Writes event files into a folder: `tensorboard --logdir FOLDER` shows them. Nothing leaves the machine.

    Raises MissingPackage where tensorboard is not installed.
    """

    def __init__(self, folder: Path, meter: StepMeter, *, start: int = 0) -> None:
        """start: steps done before the run was resumed; TensorBoard hides what the folder holds of later steps."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise missing_package("tensorboard") from error
        self._meter = meter
        self._writer = SummaryWriter(log_dir=str(folder), purge_step=start + 1)

    def step(self, report: StepReport) -> None:
        measured = self._meter.read(report)
        figures = {
            "loss": None if report.is_skipped else report.loss,
            "lr": report.lr,
            "gradient_norm": report.norm,
            f"{measured.unit}_per_second": measured.speed,
            "mfu": measured.mfu,
            "peak_memory_gib": measured.memory / 2**30,
            "waited": measured.idle,
        }
        for name, value in figures.items():
            if value is not None:
                self._writer.add_scalar(f"train/{name}", value, report.step)
        for number, rank in enumerate(measured.ranks):
            for name, share in asdict(rank).items():
                if share is not None:
                    self._writer.add_scalar(f"{name}/rank_{number}", share, report.step)

    def close(self) -> None:
        self._writer.close()
