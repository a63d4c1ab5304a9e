"""The memory that requests may hold: of one, and of all together."""

from laconic.errors import InputError, Overloaded


class BodyTooLarge(InputError):
    """The body is larger than the server takes."""

    status = 413


class MemoryBudget:
    """The bytes that all requests together may hold. limit: bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0


class Reservation:
    """What one request holds of the budget. From the event loop only."""

    __slots__ = ("_budget", "_held")

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._held = 0

    def add(self, size: int) -> None:
        """Hold so many bytes more. Raises Overloaded where the budget has not as many."""
        if self._budget.used + size > self._budget.limit:
            raise Overloaded(
                f"the requests under way hold all of the {self._budget.limit} bytes that this server has for them. "
                f"Try again later"
            )
        self._budget.used += size
        self._held += size

    def release(self) -> None:
        """Give everything back."""
        self._budget.used -= self._held
        self._held = 0
