"""A callback that logs a run for MLflow."""

import importlib
from collections.abc import Mapping
from typing import Any

from laconic.errors import UsageError
from laconic.registry import missing_package
from train.callbacks.callback import Callback, RunDescription, RunLog, StepReport, step_figures

NAME = "laconic"


class MlflowLog(RunLog):
    """A run of MLflow."""

    def __init__(self, client: Any, run_id: str) -> None:
        self._client, self._run_id = client, run_id

    def step(self, report: StepReport) -> None:
        self._log(report.step, step_figures(report))

    def evaluated(self, step: int, figures: Mapping[str, float]) -> None:
        # MLflow allows no other characters in the name of a metric.
        self._log(step, {f"eval/{''.join(c if c.isalnum() or c in '_-./ ' else '_' for c in name)}": value
                         for name, value in figures.items()})  # fmt: skip

    def _log(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._client.log_metric(self._run_id, name, value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


class MlflowTracker(Callback):
    """uri: of the tracking server or the store; by default what MLflow itself takes, as MLFLOW_TRACKING_URI.
    experiment: where the run is listed."""

    uri: str | None = None
    experiment: str = NAME

    def open(self, run: RunDescription) -> RunLog:
        try:
            mlflow: Any = importlib.import_module("mlflow")
        except ImportError as error:
            raise missing_package("mlflow") from error
        try:
            client = mlflow.MlflowClient(tracking_uri=self.uri)
            return MlflowLog(client, self._find_run(client, run))
        except Exception as error:  # of a store or a server that does not answer
            raise UsageError(
                f"mlflow refuses {self.uri or 'its default store'}: {' '.join(str(error).split())}"
            ) from error

    def _find_run(self, client: Any, run: RunDescription) -> str:
        """Find the id of this run where it is resumed, or create it."""
        known = client.get_experiment_by_name(self.experiment)
        experiment = known.experiment_id if known else client.create_experiment(self.experiment)
        same = client.search_runs([experiment], f"tags.laconic_run = '{run.key}'", max_results=1)
        if same:
            return str(same[0].info.run_id)
        made = client.create_run(experiment, tags={"laconic_run": run.key})
        for name, value in run.config.items():
            client.log_param(made.info.run_id, name, str(value)[:500])
        return str(made.info.run_id)
