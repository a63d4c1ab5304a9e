"""A cluster of Slurm with two nodes on this machine, of the packages slurmctld, slurmd and munge."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
CONFIG = """\
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=3
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,batch_sched_delay=1
ReturnToService=2
SlurmUser=root
SlurmdUser=root
MpiDefault=none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/slurmd.%n.log
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus} RealMemory=1000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus} RealMemory=1000
PartitionName=low Nodes=ALL Default=YES State=UP PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL State=UP PriorityTier=2 PreemptMode=OFF
"""


def missing_programs() -> list[str]:
    """What is not installed of Slurm, or may not be run."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    return missing or (["root's rights"] if os.geteuid() else [])


@contextmanager
def run_cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Run the cluster in the body; gives the environment of its commands."""
    folder.chmod(0o755)
    for name in ("state", "spool.n1", "spool.n2"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    config = folder / "slurm.conf"
    names = {"host": socket.gethostname().split(".")[0], "folder": folder, "cpus": os.cpu_count()}
    config.write_text(CONFIG.format(**names, ports=find_ports(3)))
    environment = os.environ | {"SLURM_CONF": str(config)}
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    munge = [f"--{name}={folder}/munge.{end}" for name, end in files.items()]
    nodes = [["slurmd", "-D", "-N", name] for name in ("n1", "n2")]
    commands = [["munged", "--foreground", "--force", *munge], ["slurmctld", "-D"], *nodes]
    with ExitStack() as stack:
        for command in commands:
            with (folder / "output.txt").open("ab") as output:
                process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            if command[0] == "munged":
                wait_until(lambda: (folder / "munge.socket").exists(), 10)
        wait_until(lambda: ask(environment, "sinfo", "-h", "-p", "low", "-o", "%D%t") == "2idle", 30)
        yield environment
        subprocess.run(["scancel", "--full", "--user=root"], env=environment, check=False)


def ask(environment: dict[str, str], *command: str) -> str:
    """What a command of Slurm prints."""
    return subprocess.run(command, env=environment, capture_output=True, text=True).stdout.strip()


def find_ports(count: int) -> list[int]:
    """Free ports."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def wait_until(condition, seconds: float) -> None:
    """Wait for a condition. Raises TimeoutError."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not after {seconds} s")
        time.sleep(0.1)
