"""`laconic finetune --on ray`: on each of some machines of a Ray cluster, the agent that `--on torchrun` starts.

Ray finds the machines and keeps their processors and GPUs for the run; how ranks meet, and start again from the last
snapshot when one dies, is the same as with every other launcher.
"""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from laconic.clusters.ray_cluster import connect_ray
from laconic.errors import TrainingFailure, UsageError
from laconic.progress import Steps
from train.launchers.parent_process import VARIABLE
from train.launchers.torchrun import ADDRESS, MEETS_HERE, SHUTDOWN_SECONDS, LaunchSettings

PLACE_SECONDS = 60
"""How long the cluster may take to find machines with room."""
LOST = -1
"""The exit code in the place of that of a machine that is gone."""


class RayAgent:
    """The agent on one machine of a cluster, as an actor of Ray."""

    def __init__(self, folder: str) -> None:
        """folder: the working folder of the command. Raises OSError where this machine has none of this name."""
        os.chdir(folder)
        self._process: subprocess.Popen[str] | None = None

    def find_endpoint(self) -> str:
        """Find where the agents of all machines can meet: the address of this one, and a free port."""
        with socket.socket() as place:
            place.bind(("", 0))
            return f"{find_own_address()}:{place.getsockname()[1]}"

    def run(self, arguments: Sequence[str], *, meets_here: bool) -> Iterator[tuple[str, str] | int]:
        """Run the command `laconic`; yields "stdout" or "stderr" with each line of its output, at last its exit code.

        meets_here: whether the agents meet on this machine.
        """
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}  # it is Ray's
        environment |= {VARIABLE: "1", ADDRESS: find_own_address(), MEETS_HERE: str(int(meets_here))}
        process = self._process = subprocess.Popen(  # noqa: S603 - our own command
            [sys.executable, "-u", "-m", "laconic", *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        )
        lines: queue.Queue[tuple[str, str]] = queue.Queue()

        def forward(name: str, stream: IO[str]) -> None:
            for line in stream:
                lines.put((name, line))
            lines.put((name, ""))

        for name, stream in {"stdout": process.stdout, "stderr": process.stderr}.items():
            threading.Thread(target=forward, args=(name, stream), daemon=True).start()
        is_open = 2
        while is_open:
            name, line = lines.get()
            is_open -= not line
            if line:
                yield name, line
        yield process.wait()

    def stop(self) -> None:
        """Ask the agent to stop, and wait until its ranks have written their snapshot."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(SHUTDOWN_SECONDS)


def find_own_address() -> str:
    """Find the address by which other machines of the cluster reach this one."""
    import ray

    return str(ray.util.get_node_ip_address())


def launch_on_ray(arguments: Sequence[str], settings: LaunchSettings, steps: Steps | None = None) -> int:
    """Run the command `laconic` with these arguments on machines of the Ray cluster at RAY_ADDRESS, or of one that is
    started on this machine, and return its exit code. Its output is theirs.

    When a machine is lost, all start again on machines that are there. Raises UsageError where the cluster has no room,
    TrainingFailure where machines are lost more often than `max_restarts`; KeyboardInterrupt after SIGTERM, when the
    ranks have written their snapshot.
    """
    steps, (least, most) = steps or Steps(), settings.node_range
    if least != most:
        raise UsageError(f"--nnodes is {settings.nnodes!r}; on a Ray cluster expected a number of machines, as {least}")
    with connect_ray(settings.nproc_per_node) as ray:
        for left in range(settings.max_restarts, -1, -1):
            code = run_once(ray, arguments, settings)
            if code != LOST:
                return code
            if left:
                steps.warn("a machine of the cluster was lost: all ranks start again, from the last snapshot")
    raise TrainingFailure(
        "machines of the cluster were lost as often as ranks are started again. Start the same command again: it goes "
        "on from the last snapshot"
    )


def run_once(ray: Any, arguments: Sequence[str], settings: LaunchSettings) -> int:
    """Start the agents, pass on their output, and return the exit code of the first that fails, LOST, or 0."""
    machines, ranks = settings.node_range[0], settings.nproc_per_node
    share = {"CPU": ranks} | ({"GPU": ranks} if ray.cluster_resources().get("GPU") else {})
    group = ray.util.placement_group([share] * machines, strategy="STRICT_SPREAD")
    try:
        if not group.wait(PLACE_SECONDS):
            raise UsageError(
                f"the cluster has no {machines} machines with {describe_share(share)} free each. Start more, or give "
                f"other --nnodes and --nproc-per-node"
            )
        agents = [place_agent(ray, group, number, share) for number in range(machines)]
        meeting = ["--rdzv-endpoint", ask(ray, agents[0].find_endpoint.remote())] if machines > 1 else []
        command = [*arguments, "--on", "torchrun", *meeting]
        with ThreadPoolExecutor(machines) as pool:
            try:
                codes = list(pool.map(lambda agent: follow(ray, agent, command, agents), agents))
            except KeyboardInterrupt:
                stop_agents(ray, agents)
                raise
        return LOST if LOST in codes else next(filter(None, codes), 0)
    finally:
        ray.util.remove_placement_group(group)


def place_agent(ray: Any, group: Any, number: int, share: dict[str, int]) -> Any:
    """Start the agent on a machine of a placement group."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    options = {
        "num_cpus": share["CPU"],
        "num_gpus": share.get("GPU", 0),
        "max_concurrency": 2,  # it runs, and can be stopped
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
    }
    return ray.remote(RayAgent).options(**options).remote(str(Path.cwd()))


def follow(ray: Any, agent: Any, command: Sequence[str], agents: Sequence[Any]) -> int:
    """Pass on the output of an agent, and return its exit code; LOST where its machine is gone. Then all stop, as they
    do after an error: else they would wait for this one."""
    try:
        start = agent.run.options(num_returns="streaming")
        for reference in start.remote(command, meets_here=agent is agents[0]):
            item = ask(ray, reference)
            if isinstance(item, int):
                return item
            name, line = item
            stream = sys.stdout if name == "stdout" else sys.stderr
            stream.write(line)
            stream.flush()
    except (ray.exceptions.RayError, UsageError) as error:
        stop_agents(ray, [other for other in agents if other is not agent])
        if not isinstance(error, ray.exceptions.RayActorError):
            raise
    return LOST


def ask(ray: Any, reference: Any) -> Any:
    """Get a result of the cluster. Raises UsageError for a machine without the folder of the command."""
    try:
        return ray.get(reference)
    except ray.exceptions.ActorDiedError as error:
        if "FileNotFoundError" in str(error):
            raise UsageError(
                f"a machine of the cluster has no folder {Path.cwd()}. Start in one that all reach"
            ) from None
        raise


def stop_agents(ray: Any, agents: Sequence[Any]) -> None:
    """Stop agents, and wait for them; those that are gone are left out."""
    for reference in [agent.stop.remote() for agent in agents]:
        try:
            ray.get(reference, timeout=2 * SHUTDOWN_SECONDS)
        except (ray.exceptions.RayError, TimeoutError):
            continue


def describe_share(share: dict[str, int]) -> str:
    """Describe what is kept on each machine, as "2 CPUs and 2 GPUs"."""
    return " and ".join(f"{count} {name}{'s' if count > 1 else ''}" for name, count in share.items())
