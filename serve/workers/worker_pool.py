"""The workers of one model: batches go to whichever is free, and a worker that dies is started again."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from laconic.arrays import Array, Arrays
from laconic.runtimes.runtime import Session
from serve.workers.engine_job import EngineJob
from serve.workers.supervisor import Report, Supervisor
from serve.workers.worker_process import WorkerConnection, WorkerLost, WorkerProcess

log = logging.getLogger("laconic.serve")


@dataclass(frozen=True)
class WatchdogLimits:
    """How long a worker may be silent. seconds: without a heartbeat, after which it is killed. crashes: in a row after
    which it is not started again. batch_seconds: in one batch, after which it is killed."""

    seconds: float
    crashes: int
    batch_seconds: float


class WorkerPool:
    """Runs batches in worker processes. It has the interface of EngineSessions."""

    local = False

    def __init__(self, job: EngineJob, limits: WatchdogLimits) -> None:
        self.job = job
        self.limits = limits
        self.sessions: Sequence[Session] = ()
        self.runtime = ""
        self.note = ""
        self.restarts = 0
        self._idle: list[WorkerConnection] = []
        self._processes: set[WorkerProcess] = set()
        self._live = 0
        self._reason = "the engine is being started"
        self._restart_at = 0.0
        self._closed = threading.Event()
        self._changed = threading.Condition()
        self._supervisors: list[Supervisor] = []

    @classmethod
    def open(cls, job: EngineJob, environments: Sequence[Mapping[str, str]], limits: WatchdogLimits) -> "WorkerPool":
        """Start a worker for each environment. Raises the error of one that does not open its sessions."""
        pool = cls(job, limits)
        try:
            for environment in environments:
                pool._start(environment)
            reports = [supervisor.ready.result() for supervisor in pool._supervisors]
        except BaseException:
            pool.close()
            raise
        opened = reports[0]
        assert opened is not None  # nobody else has the pool yet, and could close it
        pool.runtime, pool.note = opened["runtime"], opened["note"]
        pool.sessions = [PooledSession(pool) for _ in range(job.sessions * len(environments))]
        return pool

    def _start(self, environment: Mapping[str, str]) -> None:
        supervisor = Supervisor(
            "the worker",
            partial(self._run_worker, environment),
            self._closed,
            on_crash=self._note_crash,
            max_crashes=self.limits.crashes,
        )
        supervisor.start()
        self._supervisors.append(supervisor)

    @property
    def reason(self) -> str:
        """Why no batch can be run at present; empty where one can."""
        return "" if self._live else self._reason

    @property
    def processes(self) -> list[int]:
        """The process identifiers of the workers that run."""
        with self._changed:
            return [each.process.pid for each in self._processes]

    def run(self, inputs: Mapping[str, Array]) -> Arrays:
        """Run a batch in a worker that is free. Raises RuntimeFailure, and WorkerLost where the worker died or none
        runs."""
        with self._changed:
            while not self._idle:
                if not self._live:
                    raise WorkerLost(self._reason, self._restart_at - time.monotonic())
                self._changed.wait()
            connection = self._idle.pop()
        try:
            return connection.run(inputs)
        except OSError:
            raise WorkerLost("the engine stopped while it ran this request. Try again") from None
        finally:
            self._put_back(connection)

    def _put_back(self, connection: WorkerConnection) -> None:
        with self._changed:
            if not connection.lost:
                self._idle.append(connection)
                self._changed.notify()

    def interrupt(self) -> None:
        """End the workers, whatever they run."""
        self._closed.set()
        self._reason = "the model is closed"
        with self._changed:
            processes = list(self._processes)
        for process in processes:
            process.close()
        for supervisor in self._supervisors:
            supervisor.join()

    def close(self) -> None:
        """End the workers."""
        self.interrupt()

    def _note_crash(self, reason: str, delay: float | None) -> None:
        """Note why a worker crashed, for requests and the log. delay: seconds until it is started again."""
        if delay is None:
            times = self.limits.crashes
            self._reason = f"the engine stopped {times} times in a row, and is not started again: {reason}"
        else:
            self._restart_at = time.monotonic() + delay
            self._reason = f"the engine is being started again: {reason}"
            self.restarts += 1
        log.error("%s: %s", self.job.path, self._reason)

    def _run_worker(self, environment: Mapping[str, str], set_ready: Callable[[Report], None]) -> str:
        """Run one worker to its end. Returns how it ended. Raises what keeps it from opening its sessions."""
        process = WorkerProcess(self.job, environment)
        with self._changed:
            self._processes.add(process)
        try:
            if self._closed.is_set():
                return "was ended"
            report = process.wait_until_open()
            with self._changed:
                self._live += 1
                self._reason = "the engine has just stopped"  # what is said from its end on, until it is known why
                self._idle.extend(process.connections)
                self._changed.notify_all()
            set_ready(report)
            try:
                return process.watch(self.limits.seconds, self.limits.batch_seconds)
            finally:
                self._drop(process)
        finally:
            with self._changed:
                self._processes.discard(process)
            process.close()

    def _drop(self, process: WorkerProcess) -> None:
        """Take no more connections of a worker, and let those who wait see that it is gone."""
        with self._changed:
            self._live -= 1
            for connection in process.connections:
                connection.lost = True
            self._idle = [each for each in self._idle if not each.lost]
            self._changed.notify_all()


class PooledSession(Session):
    """A session of a pool: as many batches run at a time as there are of these."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool

    def run(self, inputs: Mapping[str, Array]) -> Arrays:
        return self._pool.run(inputs)
