"""Kill a process that writes snapshots, again and again, and see whether anything is lost.

    python benchmarks/kills.py [--kills 100]

Each time a process goes on from the newest snapshot and writes one after another, 8 MB of which 6 MB change; it is
killed (SIGKILL) at a random moment. Whatever it had said to be on the disk must be there, and every tensor must be that
of one and the same step.
"""

import argparse
import multiprocessing
import random
import signal
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from train.snapshots.snapshot import Snapshots
from train.snapshots.snapshot_manifest import PACKS, TEMPORARY_NAME, list_steps, manifest_path, read_manifest

SIZE = 250_000
State = dict[str, dict[str, Any]]
"""Of a run: its tensors, and its plain values under `loop`."""
LONGEST = 0.3
"""Seconds that a process lives at most after its first snapshot: some ten more of them."""


def main() -> None:
    """Kill, look, print a line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        last, halves, orphans = kill(Path(folder) / "snapshots", arguments.kills, random.Random(arguments.seed))
        seconds = time.perf_counter() - started
    print(
        f"{arguments.kills} kills in {seconds:.0f} s, {last} snapshots written: nothing lost, the newest always whole. "
        f"{halves} kills left half a file, {orphans} left tensors without their manifest"
    )


def kill(folder: Path, times: int, dice: random.Random) -> tuple[int, int, int]:
    """Kill so many processes. Returns the newest step, and how many kills left a temporary file, or unlisted packs."""
    context = multiprocessing.get_context("fork")  # torch is loaded once; nothing here has started a thread
    torch.set_num_threads(1)
    last = halves = orphans = 0
    for _ in range(times):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=write, args=(folder, there))
        process.start()
        there.close()
        said = here.recv()
        time.sleep(dice.uniform(0, LONGEST))
        process.kill()
        process.join()
        if process.exitcode != -signal.SIGKILL:
            raise SystemExit(f"the process ended by itself, with {process.exitcode}")
        said = max([said, *heard(here)])
        halves += any(TEMPORARY_NAME.fullmatch(path.name) for path in folder.rglob("*"))
        orphans += bool(loose(folder))
        last = check(folder, said)
    return last, halves, orphans


def write(folder: Path, pipe: Connection) -> None:
    """Go on from the newest snapshot, for ever. Says each step that is on the disk."""
    state = state_of(0)
    with Snapshots(folder) as snapshots:
        step = snapshots.load(state) if snapshots.latest() is not None else 0
        while True:
            snapshots.save(step + 1, set_to(state, step + 1))
            set_to(state, -1)  # what training does while the snapshot is written
            pipe.send(snapshots.latest())
            step += 1


def state_of(step: int) -> State:
    """A state that tells which step it is of."""
    empty = {name: torch.zeros(SIZE) for name in ("a", "b")}
    frozen = {"base": torch.arange(2 * SIZE, dtype=torch.float32)}
    return set_to({"model": empty | frozen, "optimizer": {"a": torch.zeros(4 * SIZE)}, "loop": {"step": 0}}, step)


def set_to(state: State, step: int) -> State:
    """Change the state in place to that of a step."""
    for number, tensor in enumerate((state["model"]["a"], state["model"]["b"], state["optimizer"]["a"])):
        tensor.fill_(step + number / 8)
    state["loop"]["step"] = step
    return state


def heard(pipe: Connection) -> list[int]:
    """What the process had still to say."""
    said = []
    try:
        while pipe.poll():
            said.append(pipe.recv())
    except (EOFError, OSError):  # it was killed in the middle of a word
        pass
    return said


def loose(folder: Path) -> set[str]:
    """Packs that no manifest names."""
    named = {name for step in list_steps(folder) for name in read_manifest(folder, step).packs}
    return {path.name for path in (folder / PACKS).glob("[!.]*")} - named


def check(folder: Path, said: int) -> int:
    """The step of the newest snapshot. Exits with a sentence where something is lost."""
    state = state_of(-1)
    with Snapshots(folder) as snapshots:
        found = snapshots.load(state)
    if found < said:
        raise SystemExit(f"step {said} was on the disk, and step {found} is found")
    if found != max(list_steps(folder)):
        raise SystemExit(f"{manifest_path(folder, max(list_steps(folder)))} is damaged")
    wanted = state_of(found)
    for part in ("model", "optimizer"):
        for name, tensor in state[part].items():
            if not torch.equal(tensor, wanted[part][name]):
                raise SystemExit(f"{part}.{name} is not that of step {found}")
    if state["loop"] != wanted["loop"]:
        raise SystemExit(f"the plain values are not those of step {found}")
    return found


if __name__ == "__main__":
    main()
