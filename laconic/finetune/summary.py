"""What a training has brought, as people and programs read it."""

from typing import Any

from laconic.console import OUT, make_table
from laconic.finetune.finetune import Tuned


def show(tuned: Tuned) -> None:
    """Print the figures before and after, and what to do next."""
    table = make_table(
        f"{tuned.folder.name}: {tuned.checkpoint.task.name}", "on samples set aside", "before", "after", right=(1, 2)
    )
    for name, value in tuned.after.items():
        table.add_row(name, f"{tuned.before[name]:.4f}" if name in tuned.before else "", f"{value:.4f}")
    OUT.print(table)
    for line in (tuned.changed, tuned.taught.waiting, tuned.taught.energy):
        if line:
            OUT.print(f"\n{line}", soft_wrap=True)
    trust = " --trust" if tuned.checkpoint.source["kind"] == "builder" else ""  # it names code that is not Laconic's
    OUT.print(f"\nNext: laconic compress {tuned.folder} --data FILE{trust} -o {tuned.folder}.laconic", soft_wrap=True)


def summary(tuned: Tuned) -> dict[str, Any]:
    """JSON-ready."""
    return {
        "checkpoint": str(tuned.folder),
        "task": tuned.checkpoint.task.name,
        "before": dict(tuned.before),
        "after": dict(tuned.after),
        "losses": list(tuned.taught.losses),
        "turned_on": tuned.changed,
        "waiting": tuned.taught.waiting,
        "energy": tuned.taught.energy,
    }
