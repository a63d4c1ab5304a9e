"""The weights of a module in what a training script saved: under which key, and with which prefix of their names."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from laconic.errors import SourceError
from laconic.models.weights import COUNTER, count_faults

log = logging.getLogger("laconic.models")

KEYS = ("state_dict", "model_state_dict", "model", "module", "net", "network", "weights", "params")
"""Keys under which training scripts save the state dict, those of PyTorch, Lightning and DeepSpeed among them."""
WRAPPERS = frozenset({"module", "_orig_mod", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""What DataParallel, AveragedModel, torch.compile, Lightning and FSDP add to names, at the start or within."""
PREFIXES = WRAPPERS | {"model", "net", "network"}
"""Attributes in which training scripts keep the model: prefixes of its names, beside which others may be ignored."""
AVERAGED = "n_averaged"
"""The counter of torch's AveragedModel, which is no weight."""
DEPTH = 3
"""How deep state dicts are looked for."""
SHOWN = 8


@dataclass(frozen=True)
class StateDict:
    """Weights by the names of a module.

    key, prefix: under which they are in the file, and what was removed from the start of their names. wrappers: what
    was removed within the names. others: how many weights beside them have another prefix.
    """

    tensors: Mapping[str, Tensor]
    key: str
    prefix: str
    wrappers: tuple[str, ...]
    others: int

    @property
    def place(self) -> str:
        """What --weights-key takes for these weights."""
        return ".".join(filter(None, (self.key, self.prefix.rstrip("."))))

    @property
    def is_common(self) -> bool:
        """Whether weights of this key and prefix are the model's, by a convention or because there are no others."""
        known = all(part in PREFIXES for part in self.prefix.rstrip(".").split("."))
        return all(key in KEYS for key in filter(None, self.key.split("."))) and (known or not self.others)

    def describe(self, path: Path) -> str:
        """Say where the weights were found in a file; empty where they stand there as they are."""
        parts = [f"took the weights under {self.key!r}"] if self.key else []
        removed = [*([self.prefix] if self.prefix else []), *(f"{wrapper}." for wrapper in self.wrappers)]
        parts += [f"removed {' and '.join(map(repr, removed))} from the names of the weights"] if removed else []
        parts += [f"ignored {self.others} weights without that prefix"] if self.others else []
        return f"{path}: {'; '.join(parts)}" if parts else ""


def find_state_dict(content: Any, module: nn.Module, path: Path, key: str | None = None) -> Mapping[str, Tensor]:
    """Find the weights of a module in the content of a file, and say where they were if they did not stand there as
    they are.

    key: where to look, keys joined by dots, or a prefix of the names. Where nothing fits, returns what comes closest.
    Raises SourceError where there are no weights, or where only --weights-key can tell which are meant.
    """
    content = select(content, key, path)
    state = module.state_dict(keep_vars=True)
    candidates = [each for at, tensors in list_state_dicts(content) for each in match_names(state, at, tensors)]
    if not candidates:
        raise SourceError(f"{path} holds no weights by name; expected a state dict, saved with model.state_dict()")
    fitting = [each for each in candidates if not count_faults(state, each.tensors)]
    chosen = next((each for each in fitting if key is not None or each.is_common), None)
    if chosen is None and fitting:
        places = list(dict.fromkeys(each.place for each in fitting))
        raise SourceError(
            f"{path} holds weights that fit the module under {', '.join(map(repr, places[:SHOWN]))}, and which are "
            f"meant is not certain. Choose with --weights-key {places[0]} (in a recipe weights_key)"
        )
    if chosen is None:
        check_values(content, path)
        return min(candidates, key=lambda each: count_faults(state, each.tensors)).tensors
    taken = {id(tensor) for tensor in chosen.tensors.values()}
    others = [each.place for each in fitting if not taken & {id(tensor) for tensor in each.tensors.values()}]
    if note := chosen.describe(path):
        log.warning("%s", note)
    if others and key is None:
        place = f"under {chosen.place!r}" if chosen.place else "at the top of the file"
        rest = ", ".join(map(repr, dict.fromkeys(others)))
        log.warning("%s: took the weights %s; those under %s fit, too: choose with --weights-key", path, place, rest)
    return chosen.tensors


def check_values(content: Any, path: Path) -> None:
    """Raise SourceError for a file of DeepSpeed's ZeRO 3, which has names and shapes: the values are in files of each
    rank, whose pickles name code."""
    if not is_mapping(content) or "param_shapes" not in content:
        return
    state = content.get("module")
    if isinstance(state, Mapping) and not any(value.numel() for value in state.values() if isinstance(value, Tensor)):
        raise SourceError(
            f"{path} is of DeepSpeed's ZeRO 3 and holds no values: these are in the pickles of each rank, which name "
            f"code and are not opened here. Gather those you trust with the script that DeepSpeed wrote in the folder "
            f"above, `python zero_to_fp32.py . weights --safe_serialization`, and give weights/model.safetensors"
        )


def find_module(content: Any, path: Path, key: str | None = None) -> nn.Module | None:
    """Find a whole module in the content of a file; None where it holds none."""
    content = select(content, key, path)
    while isinstance(content, Mapping):
        content = next((content[each] for each in KEYS if isinstance(content.get(each), (Mapping, nn.Module))), None)
    return content if isinstance(content, nn.Module) else None


def select(content: Any, key: str | None, path: Path) -> Any:
    """Return what is under a key. Raises SourceError where there is nothing."""
    if key is None:
        return content
    chosen = look_up(content, key)
    if chosen is None:
        names = list(dict.fromkeys(str(name).partition(".")[0] for name in content)) if is_mapping(content) else []
        raise SourceError(
            f"{path} has nothing under --weights-key {key!r}. At its top are {', '.join(names[:SHOWN]) or 'no keys'}"
        )
    return chosen


def look_up(content: Any, key: str) -> Any:
    """Return what is under a key of mappings within mappings, joined by dots, or under a prefix of names; else None."""
    if isinstance(content, nn.Module):
        content = content.state_dict()
    if not is_mapping(content):
        return None
    if is_mapping(content.get(key)) or isinstance(content.get(key), nn.Module):
        return content[key]
    for name, inner in content.items():
        if key.startswith(f"{name}.") and (chosen := look_up(inner, key.removeprefix(f"{name}."))) is not None:
            return chosen
    start = f"{key.rstrip('.')}."
    return {name.removeprefix(start): value for name, value in content.items() if str(name).startswith(start)} or None


def is_mapping(content: Any) -> bool:
    """Return whether a content of a file has keys."""
    return isinstance(content, Mapping)


def list_state_dicts(content: Any, key: str = "", depth: int = 0) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield the tensors by name at the top of a content and under its keys, the common ones first."""
    if isinstance(content, nn.Module):
        content = content.state_dict()
    if not is_mapping(content) or depth > DEPTH:
        return
    if tensors := {str(name): value for name, value in content.items() if isinstance(value, Tensor)}:
        yield key, tensors
    common = [name for name in KEYS if name in content]
    for name in (*common, *(each for each in content if each not in common)):
        yield from list_state_dicts(content[name], f"{key}.{name}" if key else str(name), depth + 1)


def match_names(state: Mapping[str, Tensor], key: str, tensors: Mapping[str, Tensor]) -> Iterator[StateDict]:
    """Yield the ways in which tensors may be the weights of a module, by their names: as they are, without a prefix,
    and without what wrappers add. state: the state dict of the module."""
    weights = {name: value for name, value in tensors.items() if name in state or name != AVERAGED}
    for rename in (str, strip_wrappers):
        targets = {rename(name): name for name in state}
        named = {rename(name): name for name in weights}
        if len(targets) < len(state) or len(named) < len(weights):
            continue  # two names would become one
        wrappers = WRAPPERS & {part for name in weights for part in name.split(".")} if rename is strip_wrappers else ()
        for prefix in ("", *find_prefixes(state, named, rename)):
            inside = {name: weights[was] for name, was in named.items() if name.startswith(prefix)}
            own = {name.removeprefix(prefix): value for name, value in inside.items()}
            renamed = {targets.get(name, name): value for name, value in own.items()}
            yield StateDict(renamed, key, prefix, tuple(sorted(wrappers)), len(weights) - len(inside))


def find_prefixes(state: Mapping[str, Tensor], names: Mapping[str, str], rename: Any) -> list[str]:
    """Find what may stand before the names of a module, by where its first weight is found."""
    first = next((value for name, value in state.items() if not name.endswith(COUNTER)), None)
    anchors = [f".{rename(name)}" for name, value in state.items() if value is first]  # a tied weight is saved once
    return list(dict.fromkeys(name[: 1 - len(end)] for name in names for end in anchors if name.endswith(end)))


def strip_wrappers(name: str) -> str:
    """Return a name without the parts that wrappers add to it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)
