"""The result of `laconic finetune`, as a table and as JSON."""

from typing import TYPE_CHECKING, Any

from laconic.commands.console import OUT, make_table

if TYPE_CHECKING:
    from laconic.finetune.finetune import FinetuneResult


def show(result: "FinetuneResult") -> None:
    """Print the figures before and after, and the next command."""
    table = make_table(
        f"{result.folder.name}: {result.checkpoint.task.name}", "on the validation set", "before", "after", right=(1, 2)
    )
    for name, value in result.after.items():
        table.add_row(name, f"{result.before[name]:.4f}" if name in result.before else "", f"{value:.4f}")
    OUT.print(table)
    for line in (result.changed, result.training.waiting, result.training.energy):
        if line:
            OUT.print(f"\n{line}", soft_wrap=True)
    trust = " --trust" if result.checkpoint.source["kind"] == "builder" else ""  # it names code that is not Laconic's
    OUT.print(f"\nNext: laconic compress {result.folder} --data FILE{trust} -o {result.folder}.laconic", soft_wrap=True)


def summary(result: "FinetuneResult") -> dict[str, Any]:
    """The result as JSON-ready values."""
    return {
        "checkpoint": str(result.folder),
        "task": result.checkpoint.task.name,
        "before": dict(result.before),
        "after": dict(result.after),
        "losses": list(result.training.losses),
        "turned_on": result.changed,
        "waiting": result.training.waiting,
        "energy": result.training.energy,
    }
