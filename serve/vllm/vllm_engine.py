"""vLLM behind a server: started, started again when it dies, and asked."""

import logging
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from laconic.errors import UsageError, describe_error
from serve.batching.statistics import Statistics
from serve.settings.server_settings import Settings
from serve.vllm.guardian import STOP_SECONDS
from serve.vllm.upstream import UpstreamAnswer, ask
from serve.vllm.vllm_process import VllmProcess
from serve.workers.supervisor import Report, Supervisor
from serve.workers.worker_process import WorkerLost

SOCKET = "vllm.sock"
SPARE_SECONDS = 5.0
"""How long the end of a process may take beyond that."""
Command = Callable[[Path], Sequence[str]]
"""Makes the command line of vLLM for the path of its socket."""

log = logging.getLogger("laconic.serve")


class VllmEngine:
    """A model that vLLM answers for. name: of the model. statistics: of requests that went through here."""

    def __init__(self, name: str, command: Command, environment: Mapping[str, str], settings: Settings) -> None:
        """Raises UsageError where the folder of temporary files takes no socket."""
        self.name = name
        self.statistics = Statistics()
        self._folder = tempfile.TemporaryDirectory(prefix="laconic-vllm-")  # of this user alone, as is the socket
        self._socket = Path(self._folder.name) / SOCKET
        try:
            check_path(self._socket)
        except UsageError:
            self._folder.cleanup()
            raise
        self._reason = "it is being started"
        self._restart_at = 0.0
        self._stopping = threading.Event()
        self._process: VllmProcess | None = None
        self._lock = threading.Lock()
        self._supervisor = Supervisor(
            "vLLM",
            partial(self._run_process, command(self._socket), environment, settings.watchdog),
            self._stopping,
            on_crash=self._note_crash,
            max_crashes=settings.max_crashes,
        )

    def start(self) -> None:
        """Start vLLM, and wait until it answers. Raises RuntimeFailure with what its log says where it does not."""
        self._supervisor.start()
        try:
            self._supervisor.ready.result()
        except BaseException:
            self.close()
            raise

    def check_ready(self) -> None:
        """Raise NotReady while vLLM does not run."""
        if self._reason:
            seconds = self._restart_at - time.monotonic()
            raise WorkerLost(f"model {self.name!r} is not ready: {self._reason}", seconds)

    async def ask(self, method: str, path: str, body: bytes = b"", identifier: str = "") -> UpstreamAnswer:
        """Ask vLLM. Raises NotReady."""
        self.check_ready()
        return await ask(self._socket, method, path, body, identifier)

    def close(self) -> None:
        """Stop vLLM, and wait until it is gone."""
        self._stopping.set()
        with self._lock:
            if self._process is not None:
                self._process.terminate()
        if self._supervisor.ident is not None:
            self._supervisor.join(STOP_SECONDS + SPARE_SECONDS)
        self._folder.cleanup()

    def _run_process(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        watchdog: float,
        set_ready: Callable[[Report], None],
    ) -> str:
        """Run vLLM to its end; return how it ended. Raises RuntimeFailure where it cannot be started."""
        process = VllmProcess(command, environment, self._socket)
        with self._lock:
            self._process = process
            if self._stopping.is_set():
                process.terminate()
        try:
            if not process.wait_until_ready():
                return process.describe_end()
            self._reason = ""
            set_ready({})
            return process.follow(watchdog)
        finally:
            self._reason = self._reason or "vLLM ended"
            with self._lock:
                self._process = None
            process.kill()

    def _note_crash(self, reason: str, delay: float | None) -> None:
        """Log a crash. delay: seconds until vLLM is started again; None where it is not."""
        again = "it is not started again" if delay is None else f"it is started again in {delay:g} s"
        self._restart_at = time.monotonic() + (delay or 0)
        self._reason = f"{reason}; {again}"
        log.error("%s: %s; %s", self.name, reason, again)


def check_path(path: Path) -> None:
    """Raise UsageError where no unix socket can be made at a path: Linux takes 107 bytes."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
        try:
            made.bind(str(path))
        except OSError as error:
            raise UsageError(
                f"vLLM is reached by a socket, and none can be made at {path}: {describe_error(error)}. Set TMPDIR to "
                f"a folder with a short path"
            ) from None
    path.unlink()
