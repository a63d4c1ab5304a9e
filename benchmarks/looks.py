"""The ledger of looks: which figures of a test set were seen, when, and of which code.

A script that judges by a test set takes a look. The look is in benchmarks/looks.json before anything is judged, so that
one that is interrupted is in it, too; figures follow at the end. `benchmarks/results.py` writes the ledger into the
documentation. What is chosen after a look makes the samples a development set: that is entered by hand.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from subprocess import CalledProcessError
from typing import Literal

from provenance import HOME, describe_command, list_changes, run_git
from pydantic import BaseModel, ConfigDict, RootModel

from laconic.hardware import this_machine

LEDGER = HOME / "benchmarks" / "looks.json"
UNRECORDED = "not recorded"


class Look(BaseModel):
    """One look. samples: the name of the set. digest: of its texts. depends: paths that decide the figures. figures: as
    they are printed, by what was judged."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    samples: str
    standing: Literal["test set", "development set"]
    command: str
    commit: str
    day: str
    processor: str
    digest: str
    depends: tuple[str, ...]
    figures: dict[str, str]


Ledger = RootModel[tuple[Look, ...]]


def read_looks() -> tuple[Look, ...]:
    """Read the ledger, the oldest look first."""
    return Ledger.model_validate_json(LEDGER.read_text(encoding="utf-8")).root


def write_looks(looks: Sequence[Look]) -> None:
    """Write the ledger."""
    LEDGER.write_text(Ledger(tuple(looks)).model_dump_json(indent=1) + "\n", encoding="utf-8")


@contextmanager
def take_look(samples: str, digest: str, depends: Sequence[str]) -> Iterator[dict[str, str]]:
    """Record a look, and at the end the figures that were put into the dictionary that is yielded.

    A set that counts as a development set stays one. Raises SystemExit where the working tree differs from its commit.
    """
    if changed := list_changes():
        raise SystemExit(f"a look at a test set is recorded with its commit: commit {', '.join(changed)} first")
    before = read_looks()
    is_spent = any(look.samples == samples and look.standing == "development set" for look in before)
    machine = this_machine()
    figures: dict[str, str] = {}
    look = Look(
        samples=samples,
        standing="development set" if is_spent else "test set",
        command=describe_command(sys.argv),
        commit=run_git("rev-parse", "HEAD"),
        day=datetime.now(UTC).date().isoformat(),
        processor=f"{machine.processor} ({', '.join(machine.features)})",
        digest=digest,
        depends=tuple(depends),
        figures={},
    )
    write_looks([*before, look])
    try:
        yield figures
    finally:
        write_looks([*before, look.model_copy(update={"figures": figures})])


def find_stale_looks(looks: Sequence[Look]) -> list[str]:
    """List the looks at a test set whose figures are older than the last change of what they depend on, a line each."""
    stale = []
    for look in looks:
        if look.standing == "test set":
            try:
                changes = run_git("log", "-1", "--format=%h %s", f"{look.commit}..HEAD", "--", *look.depends)
            except CalledProcessError:
                changes = "its commit is not in the history"
            stale += [f"{look.samples}, seen on {look.day}: {changes}"] if changes else []
    return stale


def render_looks() -> str:
    """Return the ledger in Markdown."""
    head = ("day", "samples", "counts as", "command", "commit", "processor", "figures")
    rows = [
        (
            look.day,
            look.samples if look.digest == UNRECORDED else f"{look.samples}, sha256 {look.digest[:16]}",
            f"**{look.standing}**",
            f"`{look.command}`",
            look.commit[:8],
            look.processor,
            "; ".join(f"{name}: {figure}" for name, figure in look.figures.items()),
        )
        for look in read_looks()
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))
