"""The metrics of all replicas of a model, gathered by the one that is asked."""

import re
from collections.abc import Mapping

from serve.http.prometheus import Metrics

GATHER_SECONDS = 5.0
"""How long a scrape waits for the metrics of the other replicas."""
SAMPLE = re.compile(r"([\w:]+)(?:\{(.*)\})? (\S+)")
"""A sample of a metric: its name, labels and value."""


class GatheredMetrics(Metrics):
    """The metrics of all replicas of a model, each with a label `replica`, whichever of them is asked."""

    async def gather(self) -> bytes:
        from ray import serve as ray_serve

        context = ray_serve.get_replica_context()
        handle = ray_serve.get_deployment_handle(context.deployment, context.app_name)
        answers = await handle.broadcast("read_metrics").results_async(timeout_s=GATHER_SECONDS, return_exceptions=True)
        texts = dict(answer for answer in answers if not isinstance(answer, BaseException))
        return merge_metrics(texts | {context.replica_tag: self.text().decode()}).encode()


def find_replica_name() -> str:
    """Return the name that Ray gave this replica."""
    from ray import serve as ray_serve

    return str(ray_serve.get_replica_context().replica_tag)


def merge_metrics(texts: Mapping[str, str]) -> str:
    """Merge metrics in Prometheus' text format into one text. texts: by the names of replicas, which become labels."""
    families: dict[str, dict[str, None]] = {}  # the lines of each metric, in order and each once
    for replica, text in sorted(texts.items()):
        family = ""
        for line in text.splitlines():
            if line.startswith("#"):
                family = line.split(" ", 3)[2]
            else:
                line = add_label(line, replica)
            families.setdefault(family, {})[line] = None
    return "".join(f"{line}\n" for lines in families.values() for line in lines)


def add_label(sample: str, replica: str) -> str:
    """Add the label of a replica to a sample."""
    match = SAMPLE.fullmatch(sample)
    assert match is not None, sample
    name, labels, value = match.groups()
    return f'{name}{{replica="{replica}"{f",{labels}" if labels else ""}}} {value}'
