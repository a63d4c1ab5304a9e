"""Ranks and agents that end with the process that has started them, so that none trains on beside those that start
again."""

import os
import threading
import time

VARIABLE = "LACONIC_ENDS_WITH_PARENT"
"""The variable by which a launcher asks the command that it starts to end with it."""
SECONDS = 0.5


def end_with_parent() -> None:
    """End this process within a second of its parent, where a launcher has asked for it. No snapshot is written then:
    another start may have begun."""
    if VARIABLE in os.environ:
        threading.Thread(target=watch_parent, args=(os.getppid(),), name="laconic-parent", daemon=True).start()


def watch_parent(parent: int) -> None:
    """End this process when its parent is another one than at first: an orphan gets a new one."""
    while os.getppid() == parent:
        time.sleep(SECONDS)
    os._exit(1)
