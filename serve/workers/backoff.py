"""How long to wait before a process that died is started again."""

LONGEST = 16.0
"""Seconds, at most, before a process that keeps dying is started again."""
STEADY = 60.0
"""Seconds after which a death is no longer counted together with the one before."""


class Backoff:
    """Delays that grow with the crashes in a row: none after the first, then 1, 2, 4, ... seconds."""

    def __init__(self) -> None:
        self.crashes = 0

    def count(self, lived: float) -> float:
        """Count a crash. lived: seconds that the process ran. Returns the seconds to wait."""
        self.crashes = 1 if lived > STEADY else self.crashes + 1
        return min(LONGEST, 2.0 ** (self.crashes - 2)) if self.crashes > 1 else 0.0
