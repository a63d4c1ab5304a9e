"""An observer that logs every step of a training run as a line of JSON."""

import json
import logging
import math
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from train.callbacks.callback import RunLog, StepReport
from train.callbacks.monitor import StepMeter

log = logging.getLogger("laconic.train")


class Journal(RunLog):
    """Writes `train.jsonl`: the report and the figures of each step.

    When a run is resumed, lines of steps after `start` are removed, and so is an incomplete last line.
    """

    def __init__(self, path: Path, meter: StepMeter, *, start: int = 0) -> None:
        """start: steps done before the run was resumed; 0 starts an empty log."""
        self._meter, self._failed = meter, False
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read_lines(path) if line["step"] <= start]
        partial = path.with_name(f".{path.name}.new")
        partial.write_text("".join(map(format_line, kept)), encoding="utf-8")
        partial.replace(path)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def step(self, report: StepReport) -> None:
        try:
            self._file.write(format_line({**asdict(report), **asdict(self._meter.read(report))}))
        except OSError as error:  # a full disk; the training goes on without the line
            if not self._failed:
                log.warning("step %d is not in the log %s: %s", report.step, self._file.name, error)
            self._failed = True

    def close(self) -> None:
        with suppress(OSError):
            self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a log, up to the first incomplete one; none where there is no log."""
    lines: list[dict[str, Any]] = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                value = json.loads(line)
            except ValueError:
                break
            if not isinstance(value, dict) or not isinstance(value.get("step"), int):
                break
            lines.append(value)
    return lines


def format_line(line: dict[str, Any]) -> str:
    """Format a line. Values without a JSON number (nan, inf) become null."""
    finite = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in line.items()}
    return json.dumps(finite, allow_nan=False) + "\n"
