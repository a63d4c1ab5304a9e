"""A callback that logs a run for Weights & Biases."""

import importlib
from collections.abc import Mapping
from typing import Any, Literal

from laconic.errors import UsageError
from laconic.registry import missing_package
from train.callbacks.callback import Callback, RunDescription, RunLog, StepReport, step_figures


class WandbLog(RunLog):
    """A run of Weights & Biases."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def step(self, report: StepReport) -> None:
        self._run.log(step_figures(report), step=report.step)

    def evaluated(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log({f"eval/{name}": value for name, value in figures.items()}, step=step)

    def close(self) -> None:
        self._run.finish()


class WandbTracker(Callback):
    """mode: "offline" writes into the folder of the run, for `wandb sync`; "online" also sends it to the server that
    wandb is logged into. project: where the run is listed."""

    project: str = "laconic"
    mode: Literal["offline", "online"] = "offline"

    def open(self, run: RunDescription) -> RunLog:
        try:
            wandb: Any = importlib.import_module("wandb")
        except ImportError as error:
            raise missing_package("wandb") from error
        settings = wandb.Settings(silent=True, console="off", disable_git=True, save_code=False)
        again = "allow" if self.mode == "online" else None  # offline, a resumed run is written beside the first part
        try:
            made = wandb.init(
                project=self.project,
                mode=self.mode,
                dir=str(run.folder),
                config=dict(run.config),
                id=run.key,
                resume=again,
                settings=settings,
            )
        except Exception as error:  # of a server that does not answer, or a login that is missing
            raise UsageError(f"wandb refuses the run: {' '.join(str(error).split())}") from error
        return WandbLog(made)
