import pytest

from laconic import registry


@pytest.fixture(scope="module")
def own_tasks():
    """Tasks of these tests, registered while a module of tests runs: an artifact may name registered tasks only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.TASKS, "padded", "served:Padded")
        patch.setitem(registry.TASKS, "brightness", "served:Brightness")
        yield
