"""`laconic finetune --on slurm`: a batch script that starts `--on torchrun` on each node, and its submission."""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from laconic.errors import UsageError
from train.launchers.torchrun import LaunchSettings

NOTICE_SECONDS = 90
"""How long before the end of its time a job is told to stop, so that it can write a snapshot and be queued again."""
FIRST_PORT, PORTS = 20_000, 10_000
"""Of the rendezvous: a port for each job."""
SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --output={log}
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=TERM@{notice}
{elastic}
# A job that is preempted, or reaches the end of its time, writes a snapshot and is queued again; it goes on from there.
trap : TERM
cd {folder}
srun --kill-on-bad-exit=0 {command} --on torchrun \\
  --rdzv-endpoint "$(hostname):$(({first} + SLURM_JOB_ID % {ports}))"
status=$?
if [ $status -eq {interrupted} ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $status
"""
"""The batch shell runs on the first node, where the agents of all nodes meet."""
INTERRUPTED = 130
"""The exit code of the command `laconic` after SIGTERM."""


def submit_job(arguments: Sequence[str], settings: LaunchSettings, output: Path) -> str:
    """Write the batch script beside `output`, submit it, and return a line about the job.

    arguments: of the command `laconic`. sbatch takes its other options from the environment, as SBATCH_PARTITION and
    SBATCH_TIMELIMIT. Raises UsageError where there is no sbatch, or it refuses the job; the script is kept.
    """
    script = output.with_name(f"{output.name}.slurm.sh")
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(make_script(arguments, settings, output), encoding="utf-8")
    script.chmod(0o755)
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise UsageError(f"there is no sbatch here. Submit {script} on a machine of the cluster: sbatch {script}")
    run = subprocess.run([sbatch, "--parsable", str(script)], capture_output=True, text=True)  # noqa: S603 - of Slurm
    if run.returncode:
        raise UsageError(f"sbatch does not take {script}: {' '.join(run.stderr.split())}")
    return f"job {run.stdout.split(';')[0].strip()} is submitted: {script}, which logs to {script.with_suffix('.log')}"


def make_script(arguments: Sequence[str], settings: LaunchSettings, output: Path) -> str:
    """Make the batch script of a run."""
    least, most = settings.node_range
    return SCRIPT.format(
        name=shlex.quote(f"laconic-{output.name}"),
        nodes=least if least == most else f"{least}-{most}",
        log=shlex.quote(str(output.with_name(f"{output.name}.slurm.log").absolute())),
        notice=NOTICE_SECONDS,
        elastic="#SBATCH --no-kill\n" if least < most else "",
        folder=shlex.quote(str(Path.cwd())),
        command=shlex.join([sys.executable, "-u", "-m", "laconic", *arguments]),
        first=FIRST_PORT,
        ports=PORTS,
        interrupted=INTERRUPTED,
    )
