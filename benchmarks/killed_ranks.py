"""Kill one of four ranks of a run of fine-tuning, again and again, and see whether and when the run goes on.

    python benchmarks/killed_ranks.py MODEL DATA [--kills 20] [--lose rank|machine|run]

MODEL is all-MiniLM-L6-v2 or a like folder, DATA texts with classes. Each time a run is started with `--on torchrun`,
and at a random moment a rank is killed by SIGKILL: one of the four of a machine, or, with `--lose machine`, one of four
agents with its only rank, after which three go on. It must take a step within 60 s, and lose `snapshot_every` steps at
most. With `--lose run` the whole run gets SIGTERM, in a step or in an evaluation, and must end within 30 s with a
snapshot of its last step.
"""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from results import Results, make_parser

from laconic.cli import INTERRUPTED
from train.callbacks.journal import read_lines
from train.snapshots.snapshot_manifest import list_steps
from train.trainer import SNAPSHOTS

RANKS, EVERY, STEPS = 4, 5, 10_000
LIMITS = {"rank": 60.0, "machine": 60.0, "run": 30.0}
"""Seconds until a run goes on, or ends."""
START = 240.0


def main() -> None:
    """Kill, wait, print a row for each time."""
    parser = make_parser(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--lose", choices=list(LIMITS), default="rank")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    results = Results(publish=arguments.publish)
    dice, times = random.Random(arguments.seed), []
    end, limit = "ended" if arguments.lose == "run" else "went on", LIMITS[arguments.lose]
    results.begin(arguments.lose, ["kill", f"{end} after, s", "steps lost", "verdict"])
    for number in range(arguments.kills):
        with tempfile.TemporaryDirectory() as folder:
            if arguments.lose == "run":
                seconds, lost = terminate_once(arguments.model, arguments.data, Path(folder), dice)
            else:
                seconds, lost = kill_once(arguments.model, arguments.data, Path(folder), arguments.lose, dice)
        times.append(seconds)
        most = 0 if arguments.lose == "run" else EVERY
        verdict = "within the limits" if seconds <= limit and lost <= most else "**too much**"
        results.add(arguments.lose, [str(number + 1), f"{seconds:.1f}", str(lost), verdict])
    good = sum(seconds <= limit for seconds in times)
    print(f"{good} of {len(times)} {end} within {limit:.0f} s; median {sorted(times)[len(times) // 2]:.1f} s")


def kill_once(model: Path, data: Path, folder: Path, lose: str, dice: random.Random) -> tuple[float, int]:
    """Return the seconds from a kill to the next step, and the number of steps that were done again."""
    log = folder / "tuned.training" / "train.jsonl"
    agents = start_agents(model, data, folder, 1 if lose == "rank" else RANKS, STEPS)
    try:
        wait_for(lambda: count(log) > EVERY, START)
        time.sleep(dice.uniform(0, 2))
        victim = agents[0] if lose == "rank" else dice.choice(agents[1:])  # the first holds the store of the agents
        ranks = sorted(psutil.Process(victim.pid).children(), key=lambda process: process.pid)
        chosen = dice.choice(ranks)
        before, began, inode = count(log), time.monotonic(), log.stat().st_ino
        for process in [chosen] if lose == "rank" else [psutil.Process(victim.pid), chosen]:
            process.send_signal(signal.SIGKILL)
        # A run that goes on writes its log anew, up to the step of its snapshot.
        wait_for(lambda: log.stat().st_ino != inode and count(log) > resumed_step(folder), START)
        return time.monotonic() - began, before - resumed_step(folder)
    finally:
        for agent in agents:
            stop(agent)


def terminate_once(model: Path, data: Path, folder: Path, dice: random.Random) -> tuple[float, int]:
    """Return the seconds from a SIGTERM to the end of the run, and the number of steps that no snapshot has."""
    log = folder / "tuned.training" / "train.jsonl"
    (agent,) = start_agents(model, data, folder, 1, EVERY)
    try:
        wait_for(lambda: count(log) > EVERY, START)
        time.sleep(dice.uniform(0, 10))
        began = time.monotonic()
        agent.terminate()
        code = agent.wait(START)
        seconds = time.monotonic() - began
        if code != INTERRUPTED:
            raise SystemExit(f"the run ended with {code}, and {INTERRUPTED} was expected: {folder / 'log.txt'}")
        return seconds, count(log) - max(list_steps(log.parent / SNAPSHOTS))
    finally:
        stop(agent)


def start_agents(model: Path, data: Path, folder: Path, count: int, eval_every: int) -> list["subprocess.Popen[bytes]"]:
    """Start the agents of one run: one with four ranks, or four with one each. eval_every: steps between
    evaluations."""
    fixed = f"--task text-classification --steps {STEPS} --batch 8 --set snapshot_every={EVERY}"
    fixed += f" --set eval_every={eval_every} --set precision=fp32 --on torchrun"
    options = ["--data", str(data), *fixed.split(), "-o", str(folder / "tuned")]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"localhost:{free.getsockname()[1]}"
    ranks = ["--nproc-per-node", str(RANKS)] if count == 1 else ["--nnodes", f"1:{RANKS}", "--rdzv-endpoint", endpoint]
    command = [sys.executable, "-m", "laconic", "finetune", str(model), *options, *ranks]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (folder / "log.txt").open("ab") as output:
        return [subprocess.Popen(command, stdout=output, stderr=output, env=environment) for _ in range(count)]


def count(log: Path) -> int:
    """Count the steps in the log of a run."""
    return len(read_lines(log))


def resumed_step(folder: Path) -> int:
    """Return the step of the snapshot that the run has last gone on from."""
    steps = re.findall(r"from the snapshot after\s+step (\d+)", (folder / "log.txt").read_text())
    return int(steps[-1]) if steps else 0


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    """Wait until a condition holds. Exits after so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise SystemExit("the run does not go on")
        time.sleep(0.05)


def stop(agent: "subprocess.Popen[bytes]") -> None:
    """Kill an agent and its ranks."""
    if agent.poll() is None:
        children = psutil.Process(agent.pid).children(recursive=True)
        agent.kill()
        for child in children:
            child.kill()
    agent.wait()


if __name__ == "__main__":
    main()
