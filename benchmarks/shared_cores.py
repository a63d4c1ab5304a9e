"""Throughput of a run of fine-tuning while other processes want the same cores, and after they have gone.

    python benchmarks/shared_cores.py MODEL DATA [--others 4] [--seconds 30] [--rounds 3] [--publish]

MODEL is all-MiniLM-L6-v2 or a like folder, DATA texts with classes. Two runs in turns: one whose threads follow the
load, and one with OMP_NUM_THREADS set to the number of cores. Each is alone at first, then beside processes that only
count, then alone again; the time in which it adapts is part of each. A fair share is that of its
threads among all: with as many threads as cores, cores / (others + cores) of the rate of a run that is alone.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from killed_ranks import START, count, stop, wait_for
from results import Results, make_parser

from laconic.hardware import cores
from train.callbacks.journal import read_lines
from train.callbacks.thread_balance import VARIABLE

WARM = 10
"""Steps before the first rate."""
PHASES = ("alone", "beside others", "alone again")


def main() -> None:
    """Measure in turns, and print the medians."""
    parser = make_parser(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--others", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    results = Results(publish=arguments.publish)
    ways: dict[str, dict[str, str]] = {"threads follow the load": {}, "threads are given": {VARIABLE: str(cores())}}
    rates: dict[str, list[list[float]]] = {way: [] for way in ways}
    for _ in range(arguments.rounds):
        for way, variables in ways.items():
            with train(arguments.model, arguments.data, variables) as log:
                rates[way].append(measure_phases(log, arguments.others, arguments.seconds))
    fair = cores() / (arguments.others + cores())
    rows = []
    for way, rounds in rates.items():
        alone, beside, again = (statistics.median(phase) for phase in zip(*rounds, strict=True))
        shares = [busy / (fair * first) for first, busy, _ in rounds]
        spread = f"{statistics.median(shares):.2f} ({min(shares):.2f} to {max(shares):.2f})"
        rows.append([way, *(f"{rate:.0f}" for rate in (alone, beside, again)), spread])
    head = ["run", *(f"tokens/s {phase}" for phase in PHASES), f"share of a fair {fair:.2f} of the rate alone"]
    results.table(f"beside {arguments.others} processes", head, rows)


@contextmanager
def train(model: Path, data: Path, variables: dict[str, str]) -> Iterator[Path]:
    """Start a run with these variables, and yield its log once it is warm."""
    fixed = "--task text-classification --steps 100000 --batch 16 --set eval_every=100000 --set precision=fp32"
    command = [sys.executable, "-m", "laconic", "finetune", str(model), "--data", str(data), *fixed.split()]
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE} | variables
    with tempfile.TemporaryDirectory() as folder:
        output, log = Path(folder) / "log.txt", Path(folder) / "tuned.training" / "train.jsonl"
        command += ["-o", f"{folder}/tuned"]
        with output.open("wb") as file:
            run = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
        try:
            wait_for(lambda: count(log) > WARM, START)
            yield log
        finally:
            stop(run)


def measure_phases(log: Path, others: int, seconds: float) -> list[float]:
    """Measure the tokens a second in each of PHASES."""
    rates = [measure_rate(log, seconds)]
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(others)]
    try:
        rates.append(measure_rate(log, seconds))
    finally:
        for process in busy:
            process.kill()
            process.wait()
    return [*rates, measure_rate(log, seconds)]


def measure_rate(log: Path, seconds: float) -> float:
    """Measure the tokens a second of the steps that end in the next seconds."""
    before, begin = count(log), time.monotonic()
    time.sleep(seconds)
    wait_for(lambda: count(log) > before, START)
    tokens: int = sum(line["tokens"] for line in read_lines(log)[before:])
    return tokens / (time.monotonic() - begin)


if __name__ == "__main__":
    main()
