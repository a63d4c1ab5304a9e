"""The workers of one model: batches go to whichever is free, and a worker that dies is started again."""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from laconic.arrays import Array, Arrays
from laconic.errors import LaconicError
from laconic.runtimes.runtime import Session
from serve.workers.backoff import Backoff
from serve.workers.engine_job import EngineJob
from serve.workers.worker_process import WorkerConnection, WorkerLost, WorkerProcess

log = logging.getLogger("laconic.serve")


@dataclass(frozen=True)
class Patience:
    """How long a worker may be silent. seconds: without a heartbeat, after which it is killed. crashes: in a row after
    which it is not started again. batch_seconds: in one batch, after which it is killed."""

    seconds: float
    crashes: int
    batch_seconds: float


class WorkerPool:
    """Runs batches in worker processes. It has the interface of EngineSessions."""

    local = False

    def __init__(self, job: EngineJob, patience: Patience) -> None:
        self.job = job
        self.patience = patience
        self.sessions: Sequence[Session] = ()
        self.runtime = ""
        self.note = ""
        self.restarts = 0
        self._idle: list[WorkerConnection] = []
        self._processes: set[WorkerProcess] = set()
        self._live = 0
        self._reason = ""
        self._restart_at = 0.0
        self._closed = threading.Event()
        self._changed = threading.Condition()
        self._supervisors: list[threading.Thread] = []

    @classmethod
    def open(cls, job: EngineJob, environments: Sequence[Mapping[str, str]], patience: Patience) -> "WorkerPool":
        """Start a worker for each environment. Raises the error of one that does not open its sessions."""
        pool = cls(job, patience)
        opened: list[Future[dict[str, str]]] = []
        try:
            for environment in environments:
                opened.append(Future())
                supervisor = threading.Thread(
                    target=pool._supervise, args=(environment, opened[-1]), name="worker-supervisor", daemon=True
                )
                pool._supervisors.append(supervisor)
                supervisor.start()
            told = [each.result() for each in opened]
        except BaseException:
            pool.close()
            raise
        pool.runtime, pool.note = told[0]["runtime"], told[0]["note"]
        pool.sessions = [PooledSession(pool) for _ in range(job.sessions * len(environments))]
        return pool

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
            outputs = connection.run(inputs)
        except OSError:
            raise WorkerLost("the engine stopped while it ran this request. Try again") from None
        except BaseException:
            self._put_back(connection)
            raise
        self._put_back(connection)
        return outputs

    def _put_back(self, connection: WorkerConnection) -> None:
        with self._changed:
            if not connection.lost:
                self._idle.append(connection)
                self._changed.notify()

    def interrupt(self) -> None:
        """End the workers, whatever they run."""
        self._closed.set()
        with self._changed:
            processes = list(self._processes)
        for process in processes:
            process.close()
        for supervisor in self._supervisors:
            supervisor.join()

    def close(self) -> None:
        """End the workers."""
        self.interrupt()

    def _supervise(self, environment: Mapping[str, str], opened: "Future[dict[str, str]]") -> None:
        """Keep a worker running. This thread lives as long as its workers, which the system kills with it."""
        backoff = Backoff()
        while not self._closed.is_set():
            started = time.monotonic()
            try:
                why = self._run_worker(environment, opened)
            except LaconicError as error:
                why = f"could not be opened: {error}"
                if not opened.done():
                    opened.set_exception(error)
                    return
            if self._closed.is_set():
                return
            delay = backoff.count(time.monotonic() - started)
            if backoff.crashes >= self.patience.crashes:
                self._reason = (
                    f"the engine stopped {backoff.crashes} times in a row, and is not started again. The last: it {why}"
                )
                log.error("%s: %s", self.job.path, self._reason)
                return
            self._restart_at = time.monotonic() + delay
            self._reason = f"the engine is being started again. It {why}"
            log.error("%s: %s", self.job.path, self._reason)
            self.restarts += 1
            self._closed.wait(delay)

    def _run_worker(self, environment: Mapping[str, str], opened: "Future[dict[str, str]]") -> str:
        """Run one worker to its end, and tell how it ended. Raises what keeps it from opening its sessions."""
        process = WorkerProcess(self.job, environment)
        with self._changed:
            self._processes.add(process)
        try:
            if self._closed.is_set():
                return "was ended"
            told = process.wait_until_open()
            with self._changed:
                self._live += 1
                self._idle.extend(process.connections)
                self._changed.notify_all()
            if not opened.done():
                opened.set_result(told)
            try:
                return process.watch(self.patience.seconds, self.patience.batch_seconds)
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
