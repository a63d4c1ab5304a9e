"""One life of vLLM as a child process."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from laconic.errors import RuntimeFailure, describe_error
from serve.vllm import guardian
from serve.workers.child_process import TICK, describe_exit, kill

HEALTH_SECONDS = 1.0
"""Time between two questions whether vLLM still answers, and how long an answer may take."""
KEPT_LINES = 400
"""Lines of the log in which the cause of an end is looked for."""
FAILURE = re.compile(
    r"(?:\([^)]*\) )?(?:ERROR .*?\] )?(?:[\w.]*(?:Error|Exception)|vllm[ \w]*: error): (?P<message>.*\S)"
)
"""A line of a log that says what failed, behind the process and the place."""
AFTERMATH = "Engine core initialization failed"
"""What vLLM says where another process of its own has said why."""
SUMMARY = "validation error"
"""What pydantic says first of several lines."""


class VllmProcess:
    """vLLM, at a unix socket. command, environment: as of `vllm_command`. socket: its path, in a folder of its
    own, which goes when this server does.

    The log goes to standard error. `guardian` runs it, in a group of processes of its own, so that a signal of the
    terminal's leaves it to this server, and its engine's processes end with it.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], socket: Path) -> None:
        self._socket = socket
        socket.unlink(missing_ok=True)
        try:
            self.process = subprocess.Popen(  # noqa: S603 - the program of the settings
                [sys.executable, "-I", guardian.__file__, str(socket), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise RuntimeFailure(f"vLLM cannot be started: {describe_error(error)}") from error
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._log = threading.Thread(target=self._pass_log_on, name="vllm-log", daemon=True)
        self._log.start()

    def wait_until_ready(self) -> bool:
        """Wait until vLLM answers; return False where it ended before."""
        while not self._ends_within(TICK):
            if is_healthy(self._socket):
                return True
        return False

    def follow(self, silence: float) -> str:
        """Wait until the process has ended, and return how. It is killed where it does not answer for longer than
        `silence` seconds, of which those do not count in which this process was stopped too."""
        misses = 0
        while not self._ends_within(HEALTH_SECONDS):
            misses = 0 if is_healthy(self._socket) else misses + 1
            if misses * HEALTH_SECONDS > silence:
                self.kill()
                return f"did not answer for {silence:g} s and was killed"
        return self.describe_end()

    def _ends_within(self, seconds: float) -> bool:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def describe_end(self) -> str:
        """Describe how the process ended, with the cause where vLLM gave up by itself and its log has one."""
        self._log.join(TICK)
        code = self.process.wait()
        cause = find_cause(list(self._lines)) if code >= 0 else ""
        return describe_exit(code) + (f": {cause}" if cause else "")

    def terminate(self) -> None:
        """Have the guardian stop vLLM."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def kill(self) -> None:
        """Kill what is left of the process and of its engine's processes, which would keep the memory of a GPU."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        kill(self.process)
        self.terminate()

    def _pass_log_on(self) -> None:
        """Copy what vLLM prints to standard error, until it ends."""
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self._lines.append(line.decode(errors="replace"))
                with contextlib.suppress(OSError, ValueError):
                    sys.stderr.buffer.write(line)
                    sys.stderr.flush()


def is_healthy(path: Path) -> bool:
    """Return whether a server at a unix socket answers `GET /health` with 200."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(HEALTH_SECONDS)
        try:
            client.connect(str(path))
            client.sendall(b"GET /health HTTP/1.1\r\nhost: vllm\r\nconnection: close\r\n\r\n")
            return client.recv(64).split(b" ")[1:2] == [b"200"]
        except OSError:
            return False


def find_cause(lines: Sequence[str]) -> str:
    """Find what the first failure in a log says, in a sentence; empty where there is none."""
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        match = FAILURE.match(line)
        if match is not None and AFTERMATH not in line:
            message = following.strip().removeprefix("Value error, ") if SUMMARY in line else match["message"]
            return message.partition(". ")[0][:300]
    return ""
