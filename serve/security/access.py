"""Who may call: the keys of callers and their rates, and what was refused, over all protocols."""

import logging
from collections import Counter

from laconic.errors import LaconicError, UsageError
from serve.asgi.wire import Headers
from serve.security.keys import CALLER, load_keys
from serve.settings.server_settings import Settings

log = logging.getLogger("laconic.serve")


class WrongSide(LaconicError):
    """A route of operators was asked for where clients ask, or the other way round."""

    status = 404


class Access:
    """Tells callers by their keys. Raises UsageError for settings that do not fit.

    refused: how many requests, by HTTP status.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.keys = load_keys(settings)
        self.refused: Counter[int] = Counter()

    def reload(self) -> None:
        """Read the file of keys again. Keys and rates stay as they are where it does not read."""
        try:
            self.keys = load_keys(self.settings, self.keys)
        except UsageError as error:
            log.error("the keys stay as they were: %s", error)

    def identify(self, headers: Headers) -> None:
        """Remember whose key it is for what the current task does. Raises Unauthorized and RateLimited."""
        if self.keys is not None:
            caller = self.keys.identify(headers)
            CALLER.set(caller)
            caller.count_request()
