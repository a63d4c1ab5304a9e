"""The command `verify`: checks of an artifact, the parity ledger, and the verdict of an adapter beside it."""

from pathlib import Path
from typing import Annotated

import typer

from laconic.commands.compression import list_missed
from laconic.commands.options import ArtifactPath, Builder, Data, Json, RuntimeName, Trust, check_unused, print_json
from laconic.errors import GoalMissed, UsageError


def verify(
    artifact: ArtifactPath,
    runtime: RuntimeName = None,
    key: Annotated[Path | None, typer.Option(help="Public key (PEM) of who must have signed the artifact.")] = None,
    ledger: Annotated[
        bool, typer.Option("--ledger", help="Follow the outputs from the original to the HTTP response.")
    ] = False,
    adapter: Annotated[
        Path | None, typer.Option(help="LoRA adapter: compare the artifact with it with the original with it.")
    ] = None,
    original: Annotated[Path | None, typer.Option(help="The source model; for --ledger and --adapter.")] = None,
    data: Data = None,
    builder: Builder = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Check the digests, golden outputs and verdict of an artifact on this machine.

    All checks are listed; the exit code is 3 if one fails. With --key, the signature is checked first, and nothing else
    if it is not that of the key. With --ledger, run a few samples through each step from the original model to the
    HTTP response instead, and name the first layer whose outputs diverge. With --adapter, make the verdict of a LoRA
    adapter beside the artifact.
    """
    if adapter is not None:
        given = {"--ledger": ledger or None, "--key": key, "--runtime": runtime, "--builder": builder}
        check_unused(given, "not for the verdict of an adapter, with which OpenVINO computes. Leave it out")
        judge(artifact, adapter, original, data, trust=trust, as_json=as_json)
        return
    if ledger:
        check_unused({"--key": key}, "for the checks of the artifact, and not for the ledger. Give one of the two")
        follow(artifact, original, runtime, data, builder=builder, trust=trust, as_json=as_json)
        return
    given = {"--original": original, "--data": data, "--builder": builder, "--trust": trust or None}
    check_unused(given, "for --ledger and --adapter. Give one of them, too")
    from laconic.artifacts.inspection import verify
    from laconic.commands.tables import print_checks

    checks = verify(artifact, runtime, key)
    print_json([check.model_dump() for check in checks]) if as_json else print_checks(checks)
    failed = [check.check for check in checks if not check.passed]
    if failed:
        raise GoalMissed(f"{artifact} failed verification: {', '.join(failed)}")


def judge(path: Path, adapter: Path, original: Path | None, data: Path | None, *, trust: bool, as_json: bool) -> None:
    """Print the verdict of an adapter beside an artifact; raise GoalMissed for what the artifact's goal asks for in
    vain."""
    if data is None:
        raise UsageError("the verdict of an adapter needs samples of what it is for, and none were given. Give --data")
    from export.adapter_verdict import judge_adapter
    from laconic.artifacts.artifact import Artifact
    from laconic.artifacts.inspection import summarize_verdict
    from laconic.commands.tables import print_verdict

    verdict, missed = judge_adapter(Artifact.load(path), adapter, data, original, trust=trust)
    if as_json:
        print_json(summarize_verdict(verdict) | {"missed": list(missed)})
    else:
        print_verdict(f"{adapter} beside {path}", verdict)
    if missed:
        raise GoalMissed(f"{path} with {adapter} does not answer as the original with it: {list_missed(missed)}")


def follow(
    path: Path,
    original: Path | None,
    runtime: str | None,
    data: Path | None,
    *,
    builder: str | None,
    trust: bool,
    as_json: bool,
) -> None:
    """Print the parity ledger of an artifact; raise GoalMissed where a step misses what is required."""
    if original is None:
        raise UsageError("the ledger starts with the original model, and none was given. Give --original SOURCE")
    from export.parity.follower import make_parity_ledger
    from export.parity.model_step import Serving
    from laconic.artifacts.artifact import Artifact
    from laconic.commands.http_session import LaidOutSession, open_served
    from laconic.commands.parity_table import print_ledger

    artifact = Artifact.load(path)
    choice = artifact.choose(runtime)
    serving = Serving(
        lay_out=lambda session: LaidOutSession.of(session, artifact),
        open=lambda: open_served(artifact, choice.engine.name),
    )
    parity = make_parity_ledger(artifact, original, choice, serving, data=data, builder=builder, trust=trust)
    print_json(parity.plain()) if as_json else print_ledger(parity)
    if parity.missed:
        raise GoalMissed(f"{path} does not keep the original's outputs. Failed: {', '.join(parity.missed)}")
