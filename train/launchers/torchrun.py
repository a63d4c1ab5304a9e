"""`laconic finetune --on torchrun`: the ranks of this machine, under an agent of torch.distributed.elastic.

It is what the command `torchrun` starts, with the rendezvous by c10d that survives the loss of ranks, and it does not
restart ranks after an error that they would have again.
"""

import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from laconic.errors import TrainingFailure, UsageError
from laconic.hardware import cores
from laconic.progress import Steps
from train.launchers.parent_process import VARIABLE

KEEP_ALIVE_SECONDS, LOST_KEEP_ALIVES = 2, 3
"""How often an agent says that it lives, and after how many misses the others go on without it."""
LAST_CALL_SECONDS = 5
"""How long agents wait for further ones when they are enough."""
JOIN_SECONDS = 600
"""How long agents wait until they are enough."""
SHUTDOWN_SECONDS = 60
"""How long ranks that were asked to stop may write their snapshot."""
MONITOR_SECONDS = 0.1
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""The variable that gives ranks a new store with each start. From a store that is kept, ranks that start again may read
the addresses of those that have ended, and wait for them without end (torch 2.13)."""

ADDRESS, MEETS_HERE = "LACONIC_AGENT_ADDRESS", "LACONIC_AGENTS_MEET_HERE"
"""The variables by which a launcher says under which address this machine is reached, and whether agents meet on it (1
or 0). Torch goes by the host name, which other machines of a cluster need not know."""


@dataclass(frozen=True)
class LaunchSettings:
    """nnodes: machines, as "2", or as "1:2" for at least 1 and at most 2. nproc_per_node: ranks on each of them.
    rdzv_endpoint: HOST:PORT of one of the machines, where their agents meet; needed for several. max_restarts: how
    often ranks that have failed are started again."""

    nnodes: str = "1"
    nproc_per_node: int = 1
    rdzv_endpoint: str | None = None
    max_restarts: int = 10

    @property
    def node_range(self) -> tuple[int, int]:
        """Fewest and most machines. Raises UsageError."""
        least, _, most = self.nnodes.partition(":")
        try:
            numbers = int(least), int(most or least)
        except ValueError:
            numbers = 0, 0
        if not 1 <= numbers[0] <= numbers[1]:
            raise UsageError(f"--nnodes is {self.nnodes!r}; expected a number of machines, as 2, or a range, as 1:2")
        return numbers


class Agent(LocalElasticAgent):
    """An agent that says why it restarts its ranks, and does not restart them after an error in what they were
    given."""

    def __init__(self, spec: WorkerSpec, steps: Steps) -> None:
        super().__init__(spec, DefaultLogsSpecs(), shutdown_timeout=SHUTDOWN_SECONDS)
        self._steps = steps

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():
            if any(failure.exitcode == UsageError.exit_code for failure in result.failures.values()):
                self._remaining_restarts = 0
            if self._remaining_restarts:
                self._steps.warn(f"{describe_failure(result)}: all ranks start again, from the last snapshot")
        return result


def launch_ranks(arguments: Sequence[str], settings: LaunchSettings, run: str, steps: Steps | None = None) -> int:
    """Run the command `laconic` with these arguments on the ranks of this machine, and return its exit code. Its output
    is theirs.

    run: a name that the agents of all machines have in common. Raises UsageError, TrainingFailure where agents do not
    meet; KeyboardInterrupt after SIGTERM, when the ranks have written their snapshot.
    """
    steps = steps or Steps()
    if settings.node_range[1] > 1 and settings.rdzv_endpoint is None:
        raise UsageError("several machines need a place to meet. Give --rdzv-endpoint HOST:PORT of one, alike on all")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # `Agent` says what happens
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // settings.nproc_per_node)))
    os.environ.setdefault(OWN_STORE, "1")
    os.environ[VARIABLE] = "1"
    address = "localhost" if settings.rdzv_endpoint is None else os.environ.get(ADDRESS)
    handler = make_rendezvous(settings, run, address)
    spec = WorkerSpec(
        "laconic",
        settings.nproc_per_node,
        handler,
        entrypoint=sys.executable,
        args=("-u", "-m", "laconic", *arguments),
        max_restarts=settings.max_restarts,
        monitor_interval=MONITOR_SECONDS,
        local_addr=address,
    )
    is_over = True
    try:
        result = Agent(spec, steps).run()
    except SignalException:
        is_over = False  # the agents of other machines may go on
        raise KeyboardInterrupt from None
    except RendezvousError as error:
        raise TrainingFailure(
            f"this machine has lost the others, or did not find them at {settings.rdzv_endpoint}: {error}. Start the "
            f"same command again on all of them: it goes on from the last snapshot"
        ) from error
    finally:
        if is_over:
            handler.shutdown()
    return find_exit_code(result) if result.is_failed() else 0


def make_rendezvous(settings: LaunchSettings, run: str, address: str | None) -> RendezvousHandler:
    """Make what the agents of all machines meet by. run: as of `launch_ranks`. address: of this machine, None for its
    host name."""
    is_alone, (least, most) = settings.rdzv_endpoint is None, settings.node_range
    place = {"is_host": os.environ[MEETS_HERE]} if MEETS_HERE in os.environ and not is_alone else {}
    return get_rendezvous_handler(
        RendezvousParameters(
            "c10d",
            settings.rdzv_endpoint or "localhost:0",
            uuid.uuid4().hex if is_alone else run,
            least,
            most,
            local_addr=address,
            keep_alive_interval=KEEP_ALIVE_SECONDS,
            keep_alive_max_attempt=LOST_KEEP_ALIVES,
            last_call_timeout=LAST_CALL_SECONDS,
            join_timeout=JOIN_SECONDS,
            **place,
        )
    )


def find_exit_code(result: RunResult) -> int:
    """Find the exit code of ranks that have failed: that of a wrong usage, else of the first. Raises TrainingFailure
    where a signal has killed it."""
    codes = [failure.exitcode for failure in sorted(result.failures.values(), key=lambda failure: failure.timestamp)]
    if codes[0] < 0 and UsageError.exit_code not in codes:
        raise TrainingFailure(
            f"{describe_failure(result)}, as often as ranks are started again. Start the same command again: it goes "
            f"on from the last snapshot"
        )
    return UsageError.exit_code if UsageError.exit_code in codes else codes[0]


def describe_failure(result: RunResult) -> str:
    """Say which rank has failed first, and how."""
    rank, failure = min(result.failures.items(), key=lambda item: (item[1].exitcode > 0, item[1].timestamp))
    if failure.exitcode < 0:
        return f"rank {rank} was killed by {signal.Signals(-failure.exitcode).name}"
    return f"rank {rank} ended with exit code {failure.exitcode}"
