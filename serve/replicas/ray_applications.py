"""The applications of Ray Serve that answer for models, from their deployment to their end."""

import logging
import re
import signal
import sys
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import FrameType
from typing import Any

from laconic.errors import RuntimeFailure

OWN_ERROR = re.compile(r"^(?:laconic|serve)\.[\w.]+: ")
LOOK_SECONDS = 0.2
"""Time between two looks at applications that are being deployed."""


class RayApplications:
    """The applications of models on a cluster, as long as the command runs. ray_serve: the module of Ray Serve."""

    def __init__(self, ray_serve: Any, host: str, port: int) -> None:
        self.ray_serve = ray_serve
        self.host = host
        self.port = port
        self._stopping = threading.Event()

    def run(self, applications: Mapping[str, Any], routes: Mapping[str, str], replicas: str) -> None:
        """Deploy the models, and delete them when a signal comes, after the requests that are in flight.

        applications, routes: what is deployed and the prefixes of paths, by the names of models. replicas: how many,
        for the line of a ready server. Raises RuntimeFailure.
        """
        ray_serve = self.ray_serve
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        try:
            ray_serve.start(http_options={"host": self.host, "port": self.port})
        except RuntimeError as error:
            raise RuntimeFailure(f"Ray Serve cannot start: {find_reason(error)}") from error
        targets = [
            ray_serve.RunTarget(target=application, name=name, route_prefix=routes[name])
            for name, application in applications.items()
        ]
        try:
            ray_serve.run_many(targets, wait_for_applications_running=False)
            self._wait_until_running(applications)
            if not self._stopping.is_set():
                sys.stdout.write(f"{self._format_welcome(routes, replicas)}\n")
                sys.stdout.flush()
            self._stopping.wait()
        finally:
            for name in applications:
                with suppress(ray_serve.exceptions.RayServeException):
                    ray_serve.delete(name, _blocking=name == list(applications)[-1])

    def _stop(self, sig: int, frame: FrameType | None) -> None:
        self._stopping.set()

    def _wait_until_running(self, names: Iterable[str]) -> None:
        """Wait until every model has replicas that answer. Raises RuntimeFailure for one that cannot be deployed."""
        waiting = set(names)
        while waiting and not self._stopping.wait(LOOK_SECONDS):
            applications = self.ray_serve.status().applications
            for name in sorted(waiting):
                status = applications[name].status
                if status == "DEPLOY_FAILED":
                    messages = [each.message for each in applications[name].deployments.values()]
                    reason = find_reason("\n".join([applications[name].message, *messages]))
                    raise RuntimeFailure(f"model {name!r} cannot be deployed on the cluster: {reason}")
                if status == "RUNNING":
                    waiting.discard(name)

    def _format_welcome(self, routes: Mapping[str, str], replicas: str) -> str:
        """Format the line for a ready server: its address, and the path of each model."""
        url = f"http://{self.host}:{self.port}"
        places = ", ".join(f"{name} at {url}{route.rstrip('/')}" for name, route in routes.items())
        return f"Serving {places}, by {replicas}"


def find_reason(failure: object) -> str:
    """Return the last line of what Ray says of a failure, without the class of an error of ours; what stands before it
    is a traceback."""
    return OWN_ERROR.sub("", (str(failure).strip() or type(failure).__name__).splitlines()[-1])
