"""Families of models through the command line: what runs with the default recipe, and how close the answers are.

    python benchmarks/families.py FOLDER [FAMILY or GROUP ...] [--timeout 600]

Groups: transformers, timm (which must be installed), modules (of one's own, with a builder). For each family a tiny
model with the real structure and random weights is written to FOLDER, opened, and compared with the library that wrote
it; compressed with the default recipe; pruned to half of its units, and loaded again; and the artifact is served, its
answer over HTTP compared with that of the loaded artifact. A row is kept beside the model and not made again: an
interrupted run goes on, and `--again` makes the rows of these families anew, as does `--publish`. Prints the rows of
all families that were asked for, and counts. The output of each command is kept too. About half a minute for each
family on one core.
"""

import json
import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from family_images import IMAGE_FAMILIES
from family_maps import MAP_FAMILIES
from family_modules import MODULES
from family_sounds import SOUND_FAMILIES
from family_subject import make_subject
from family_texts import TEXT_FAMILIES
from family_timm import TIMM
from family_writers import WRITER_FAMILIES
from results import Results, make_parser

from laconic import cli
from laconic.artifacts.artifact import Artifact
from laconic.commands.http_session import open_served
from laconic.errors import LaconicError
from laconic.models.source_loading import load_source
from laconic.runtimes.runtime import make_runtime

GROUPS: dict[str, list[str]] = {
    "transformers": [*TEXT_FAMILIES, *WRITER_FAMILIES, *IMAGE_FAMILIES, *MAP_FAMILIES, *SOUND_FAMILIES],
    "timm": list(TIMM),
    "modules": list(MODULES),
}
PRUNE = {
    "channels": "prune.channels: {keep: 0.5}",
    "heads and FFN": "prune.ffn: {keep: 0.5}\n  - prune.heads: {keep: 0.5}",
    "FFN": "prune.ffn: {keep: 0.5}",
    "heads": "prune.heads: {keep: 0.5}",
}
"""Stages by which a family is pruned."""
ENDINGS = {1: "refused", 2: "refused", 3: "missed"}
"""How a command ended, by its exit code where it is not 0. A traceback and every other code are faults."""
COLUMNS = ("family", "task", "agreement", "compress", "endpoint", "prune", "reload")
EXACT = 1e-4
"""The largest difference from the library, relative to the largest output, that is no wrong answer."""


def main() -> None:
    """Run, and print the table."""
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("families", nargs="*", help="families or groups; default: all", metavar="FAMILY")
    parser.add_argument("--timeout", type=int, default=600, help="seconds for one command")
    parser.add_argument("--again", action="store_true", help="make rows anew that are kept")
    arguments = parser.parse_intermixed_args()  # options may stand between the folder and the families
    results = Results(publish=arguments.publish)
    rows = []
    for group, name in choose(arguments.families or list(GROUPS)):
        folder = arguments.folder / name.replace(" ", "-")
        kept = folder / "row.json"
        if arguments.again or arguments.publish or not kept.exists():
            row = {"group": group, "family": name} | make_row(group, name, folder, arguments.timeout)
            kept.write_text(json.dumps(row, indent=1), encoding="utf-8")
            print(*format_row(row), sep=", ", file=sys.stderr, flush=True)
        rows.append(json.loads(kept.read_text(encoding="utf-8")))
    print_tables(rows, results)


def choose(names: list[str]) -> list[tuple[str, str]]:
    """The groups and names of families that are asked for."""
    given = {name: group for group, families in GROUPS.items() for name in families}
    return [(given[each], each) for name in names for each in GROUPS.get(name, [name])]


def make_row(group: str, name: str, folder: Path, timeout: int) -> dict[str, str]:
    """What came of one family."""
    for left in ("artifact", *PRUNE):
        shutil.rmtree(folder / left, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)

    def run(function: Callable[..., str], *arguments: Any, log: str = "log") -> str:
        return run_apart(function, arguments, folder / f"{log}.txt", timeout)

    found = run(describe, group, name, folder)
    task, _, agreement = found.partition("|")
    if not agreement:
        return {"agreement": found}
    compressed = run(compress, group, name, folder, folder / "artifact", log="compress")
    served = run(compare_endpoint, folder / "artifact", log="endpoint") if (folder / "artifact").exists() else "-"
    pruned, reloaded, done, tried = [], [], False, set[str]()
    for kind in make_subject(group, name, folder).prunes:
        if kind in tried or (done and kind != "channels"):
            continue  # no blocks were found, or this is a part of what was pruned already
        said = run(compress, group, name, folder, folder / kind, log=kind.replace(" ", "-"))
        pruned.append(kind if said == "done" else f"{kind}: {said}")
        if "has no transformer blocks" in said:
            tried = {"heads and FFN", "FFN", "heads"}
        if said == "done":
            done = True
            reloaded.append(run(reopen, group, name, folder, folder / kind, log="reload"))
    if done:
        pruned = [each for each in pruned if ": refused" not in each]
    row = {"task": task, "agreement": agreement, "compress": compressed, "endpoint": served}
    return row | {"prune": "; ".join(pruned), "reload": "; ".join(reloaded)}


def run_apart(function: Callable[..., str], arguments: tuple[Any, ...], log: Path, timeout: int) -> str:
    """Run a function in a process of its own, as a command runs, without importing everything again."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["family_subject", "compress.pipeline", "families"])
    answer = log.with_suffix(".answer")
    answer.unlink(missing_ok=True)
    process = context.Process(target=enter, args=(function, arguments, log, answer))
    process.start()
    process.join(timeout)
    if process.is_alive():
        process.kill()
        return "failed: did not end in time"
    if answer.exists():
        said = answer.read_text(encoding="utf-8")
        answer.unlink()
        return said
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    said = " ".join(" ".join(lines[-3:]).rpartition("laconic: ")[2].split())
    fault = "Traceback" in "".join(lines) or process.exitcode not in ENDINGS
    return f"{'failed' if fault else ENDINGS[process.exitcode or 0]}: {said[:300]}"


def enter(function: Callable[..., str], arguments: tuple[Any, ...], log: Path, answer: Path) -> None:
    """The process: writes what the function returns to a file, and everything that is printed to another one."""
    torch.set_num_threads(1)
    with log.open("w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        answer.write_text(function(*arguments), encoding="utf-8")


def describe(group: str, name: str, folder: Path) -> str:
    """The task, and the largest difference of an output from the library's, relative to the largest; or why the model
    is refused when it is opened."""
    subject = make_subject(group, name, folder)
    try:
        checkpoint = subject.open()
        pairs = list(subject.pairs(checkpoint))
    except LaconicError as error:
        return f"refused: {error}"
    worst = 0.0
    for found, expected in pairs:
        found, expected = found.float().squeeze(), expected.float().squeeze()
        if found.shape != expected.shape:
            return f"{checkpoint.task.name}|wrong: {tuple(found.shape)} in place of {tuple(expected.shape)}"
        worst = max(worst, float((found - expected).abs().max() / expected.abs().max()))
    return f"{checkpoint.task.name}|{'' if worst <= EXACT else 'wrong: '}{worst:.0e}"


def compress(group: str, name: str, folder: Path, output: Path) -> str:
    """The command `laconic compress`: with the default recipe, or to a pruned checkpoint. Leaves with its exit code."""
    subject = make_subject(group, name, folder)
    given = ["compress", subject.source, "--data", subject.data, "-o", output, *subject.options]
    content: dict[str, Any] = {"arguments": dict(subject.arguments)} if subject.arguments else {}
    recipe = folder / f"{output.name.replace(' ', '-')}.yaml"
    lines = json.dumps(content)[1:-1] + "\n" if content else ""
    if output.name in PRUNE:
        lines += f"stages:\n  - {PRUNE[output.name]}\nheal: false\n"
        given += ["--to", "checkpoint", "--fidelity", "0"]
    if lines:
        recipe.write_text(lines, encoding="utf-8")
        given += ["--recipe", recipe]
    sys.argv = ["laconic", *map(str, given)]
    try:
        cli.main()
    except SystemExit as ended:
        if ended.code:
            os._exit(int(ended.code))
    return "done"


def compare_endpoint(path: Path) -> str:
    """Whether the server gives what the artifact gives when it is loaded."""
    artifact = Artifact.load(path)
    task = artifact.task()
    inputs = task.encode_request(task.examples(1)[0])
    try:
        with open_served(artifact, artifact.manifest.placement) as served:
            found = served.run(inputs)
        engine = make_runtime(artifact.manifest.placement)
        with artifact.open_unchecked(engine, artifact.manifest.placements[0])[0] as session:
            expected = session.run(inputs)
    except LaconicError as error:
        return f"failed: {error}"
    return "equal" if all(np.allclose(found[key], expected[key], atol=1e-4) for key in expected) else "wrong: differs"


def reopen(group: str, name: str, folder: Path, path: Path) -> str:
    """Open a pruned checkpoint, which is refused unless its weights are bit for bit those that were saved, and say what
    share of the parameters is left."""
    whole, left = (
        sum(each.numel() for each in checkpoint.module.parameters())
        for checkpoint in (make_subject(group, name, folder).open(), load_source(path, trust=True))
    )
    return f"equal, {left / whole:.0%}" if left < whole else "wrong: nothing was removed"


def format_row(row: dict[str, str]) -> list[str]:
    """Return the cells of a row, without the sentences."""
    return [shorten(row.get(column) or "-") for column in COLUMNS]


def shorten(cell: str) -> str:
    """What came of a step, without the sentence: of several that were tried, the worst."""
    ends = ("wrong", "failed", "missed", "refused")
    return next((end for end in ends if cell.startswith(f"{end}:") or f": {end}:" in cell), cell)


def print_tables(rows: list[dict[str, str]], results: Results) -> None:
    """Print the rows, how many of each group did what, and the sentences of those that did not."""
    results.table("families", COLUMNS, [format_row(row) for row in rows])
    print()
    results.begin("groups", ["group", "families", "compressed and served", "pruned", "faults"])
    for group in GROUPS:
        own = [row for row in rows if row["group"] == group]
        done = sum(row.get("compress") == "done" and row.get("endpoint") == "equal" for row in own)
        pruned = sum((row.get("reload") or "").startswith("equal") for row in own)
        faults = sum("failed:" in str(row) or "wrong:" in str(row) for row in own)
        results.add("groups", [group, *map(str, (len(own), done, pruned, faults))])
    print()
    for row in rows:
        for column in COLUMNS:
            if (cell := row.get(column) or "") != shorten(cell):
                print(f"{row['family']}, {column}: {cell}")


if __name__ == "__main__":
    main()
