"""A program that runs the one that its arguments name, and ends it with all its processes when its own input ends.

vLLM's engine outlives a server that is killed, and keeps the memory of the GPU. This program, which leads a group of
processes with vLLM in it, hears that the server is gone. It is run by its path, with nothing but the standard library.
Its first argument is the path of vLLM's socket, which goes with its folder then.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

STOP_SECONDS = 8.0
"""How long the program may take to stop by itself: vLLM then removes its shared memory."""


def main() -> None:
    """Run the program, and end as it does."""
    child = subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL)  # noqa: S603 - the program of the settings
    stopping = threading.Event()

    def stop_at_end() -> None:
        while os.read(0, 1):
            pass
        stopping.set()
        child.terminate()
        time.sleep(STOP_SECONDS)
        end_group()

    threading.Thread(target=stop_at_end, daemon=True).start()
    code = child.wait()
    if stopping.is_set():
        end_group()
    if code < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def end_group() -> None:
    """Remove the socket, with its folder, and kill all processes of the group, of which this is one."""
    socket = Path(sys.argv[1])
    with contextlib.suppress(OSError):
        socket.unlink(missing_ok=True)
        socket.parent.rmdir()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
