import signal

import pytest

from laconic import registry

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts the tests in the background ignores it


@pytest.fixture(scope="module")
def own_tasks():
    """Tasks of these tests, registered while a module of tests runs: an artifact may name registered tasks only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.TASKS, "padded", "served:Padded")
        patch.setitem(registry.TASKS, "brightness", "served:Brightness")
        yield
