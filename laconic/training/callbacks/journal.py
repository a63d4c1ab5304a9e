"""Every step of a training run as a line of JSON: for a plot, a comparison, a script."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from laconic.training.callbacks.monitor import Gauge, StepReport


class Journal:
    """Writes `train.jsonl`: the report and the reading of each step.

    Lines of steps after `start` are cut when the run is resumed, as is half a line that a crash left.
    """

    def __init__(self, path: Path, gauge: Gauge, *, start: int = 0) -> None:
        """start: steps that were done before; 0 begins anew."""
        self._gauge = gauge
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in lines(path) if line["step"] <= start]
        made = path.with_name(f".{path.name}.new")
        made.write_text("".join(map(dump, kept)), encoding="utf-8")
        made.replace(path)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def step(self, report: StepReport) -> None:
        self._file.write(dump({**asdict(report), **asdict(self._gauge.read(report))}))

    def close(self) -> None:
        self._file.close()


def lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a journal, up to the first that was not written whole; none where there is no journal."""
    found: list[dict[str, Any]] = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                value = json.loads(line)
            except ValueError:
                break
            if not isinstance(value, dict) or not isinstance(value.get("step"), int):
                break
            found.append(value)
    return found


def dump(line: dict[str, Any]) -> str:
    """One line. What JSON has no number for (nan, inf) is null."""
    finite = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in line.items()}
    return json.dumps(finite, allow_nan=False) + "\n"
