"""A pass through a stack of layers, up and down again, in which one layer at a time has more than its input."""

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from laconic.layerwise.layer_call import Turn
from laconic.layerwise.revolve import schedule
from laconic.layerwise.rng_state import Dice, Precision, borrowed
from laconic.offload.host import Host
from laconic.offload.memory_accounting import accounted, among, reduced
from laconic.offload.weight_provider import Sums, Supply, on_gradient


@dataclass(frozen=True, eq=False)
class Means:
    """What a pass works with. rows: of the batch, at a time; None takes them all. snapshots: inputs of layers that are
    kept at a time; None keeps each. keep: where."""

    supply: Supply
    host: Host
    device: torch.device
    rows: int | None = None
    snapshots: int | None = None
    keep: Literal["device", "host"] = "device"


class Shelf:
    """Inputs of layers that wait for their turn, by step, on the device or on the host."""

    def __init__(self, means: Means) -> None:
        self._host = means.host if means.keep == "host" else None
        self._kept: dict[int, Tensor] = {}
        self._coming: dict[int, Tensor] = {}

    def store(self, step: int, state: Tensor) -> None:
        """Keep it from now on."""
        with accounted(category="activations"):
            self._kept[step] = self._host.put(state) if self._host else state

    def fetch(self, step: int) -> None:
        """It is needed soon."""
        if self._host and step not in self._coming:
            self._coming[step] = self._host.get(self._kept[step], category="activations")

    def take(self, step: int) -> Tensor:
        """It is needed now, and kept all the same."""
        if not self._host:
            return self._kept[step]
        self.fetch(step)
        self._host.wait()
        return self._coming.pop(step)

    def free(self, step: int) -> None:
        """Keep it no longer."""
        del self._kept[step]


class Passage:
    """One pass. Layers run forward without a graph; each is run again, part by part of the batch, when its turn comes
    to be taken back, with the same numbers drawn and the same autocast.

    Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), over the schedule of `revolve`.
    """

    def __init__(self, means: Means, steps: int) -> None:
        self.means = means
        self._precision = Precision.now(means.device)
        actions = list(schedule(steps, min(means.snapshots or steps, steps)))
        turning = next(at for at, action in enumerate(actions) if action.kind in ("free", "reverse"))
        self._stored = {action.step for action in actions[:turning] if action.kind == "store"}
        self._down = actions[turning:]
        self._turns: list[Turn] = []
        self._shelf = Shelf(means)
        self._state: Tensor | None = None

    def up(self, turn: Turn, hidden: Tensor, then: nn.Module | None) -> tuple[Tensor, object]:
        """Take a layer's turn on the way up; gives the hidden states after it, and its output as it is.

        then: the layer whose turn is next; None at the top.
        """
        step = len(self._turns)
        self._turns.append(turn)
        if step in self._stored:
            self._shelf.store(step, hidden.detach())
        if then is None:
            self._state = hidden.detach()
        # Detached, so that whoever counts operations by hooks on modules finds no graph that ends here.
        return run(self.means, turn, hidden.detach(), then, self._precision)

    def down(self, gradient: Tensor, wanted: bool) -> Tensor | None:
        """From the gradient of the top's output, which is overwritten, to that of the bottom's input, if `wanted`."""
        shelf, visits = self._shelf, self._visits()
        state, self._state = self._state, None
        at = len(self._turns) - 1
        with borrowed(self.means.device):
            for number, (kind, step) in enumerate(self._down, 1):
                if kind == "restore":
                    state, at = shelf.take(step), step
                    continue
                assert state is not None, "every schedule restores a state after it has used one up"
                if kind == "store":
                    shelf.store(step, state)
                elif kind == "free":
                    shelf.free(step)
                elif kind == "advance":
                    for turn in self._turns[at:step]:
                        state = run(self.means, turn, state, self._next(visits), self._precision)[0]
                    at = step
                else:
                    for soon in self._down[number : number + 1]:
                        if soon.kind == "restore":
                            shelf.fetch(soon.step)
                    gradient = self._reverse(self._turns[step], state, gradient, wanted or step > 0, self._next(visits))
                    state = None
        self.means.supply.close()
        return gradient if wanted else None

    def _visits(self) -> deque[nn.Module]:
        """The layers that run on the way down, in order."""
        found: deque[nn.Module] = deque()
        at = len(self._turns) - 1
        for kind, step in self._down:
            if kind == "advance":
                found.extend(turn.layer for turn in self._turns[at:step])
            elif kind == "reverse":
                found.append(self._turns[step].layer)
            if kind in ("advance", "restore"):
                at = step
        return found

    @staticmethod
    def _next(visits: deque[nn.Module]) -> nn.Module | None:
        """The layer after the one whose turn it is."""
        visits.popleft()
        return visits[0] if visits else None

    def _reverse(self, turn: Turn, state: Tensor, gradient: Tensor, wanted: bool, then: nn.Module | None) -> Tensor:
        """Run a layer again and take it back, part by part; gives the gradient of its input, if `wanted`."""
        weights = self.means.supply.take(turn.layer, then)
        parameters = dict(turn.layer.named_parameters())
        parts = parts_of(state, self.means.rows)
        sums = Sums(len(parts), lambda name, whole: self.means.supply.give(parameters[name], whole))
        leaves = {}
        for name, weight in weights.items():
            leaves[name] = weight
            if parameters[name].requires_grad:
                leaves[name] = weight.detach().requires_grad_()
                on_gradient(leaves[name], partial(sums.add, name))
        found = gradient if (gradient.shape, gradient.dtype) == (state.shape, state.dtype) else torch.empty_like(state)
        for part, dice in among(list(zip(parts, turn.dice, strict=True)), count_of(state, self.means.rows)):
            sums.begin()
            dice.lay(self.means.device)
            self._reverse_part(turn, leaves, state, gradient, found if wanted else None, part)
        sums.close()
        return found

    def _reverse_part(
        self,
        turn: Turn,
        leaves: dict[str, Tensor],
        state: Tensor,
        gradient: Tensor,
        found: Tensor | None,
        part: slice | None,
    ) -> None:
        """The same for a part, whose gradient is written into `found`, which may be `gradient` itself."""
        place = slice(None) if part is None else part
        hidden = state[place].detach().requires_grad_(found is not None)
        with torch.enable_grad(), self._precision.again():
            output, _ = turn(leaves, hidden, part)
        if output.requires_grad:
            torch.autograd.backward([output], [gradient[place]])
        if found is not None:
            assert hidden.grad is not None
            found[place] = hidden.grad


def run(
    means: Means, turn: Turn, hidden: Tensor, then: nn.Module | None, precision: Precision
) -> tuple[Tensor, object]:
    """A layer forward without a graph, part by part; notes what it draws the first time, and draws it again later."""
    weights = means.supply.take(turn.layer, then)
    parts = parts_of(hidden, means.rows)
    again = bool(turn.dice)
    whole: Tensor | None = None
    for number, part in enumerate(among(parts, count_of(hidden, means.rows))):
        if again:
            turn.dice[number].lay(means.device)
        else:
            turn.dice.append(Dice.now(means.device))
        with torch.no_grad(), precision.again():
            value, output = turn(weights, hidden if part is None else hidden[part], part)
            if part is None:
                return value, output
            if whole is None:
                whole = value.new_empty((hidden.shape[0], *value.shape[1:]))
            whole[part] = value
    assert whole is not None
    return whole, (whole, *output[1:]) if isinstance(output, tuple) else whole


def parts_of(hidden: Tensor, rows: int | None) -> list[slice | None]:
    """The batch in parts of at most `rows` rows; None for all of it.

    A batch of as many rows as tokens stays whole: nothing tells then which axis of a mask is which.
    """
    count = hidden.shape[0]
    if rows is None or rows >= count or (hidden.ndim > 1 and hidden.shape[1] == count):
        return [None]
    return reduced([slice(start, min(start + rows, count)) for start in range(0, count, rows)])


def count_of(hidden: Tensor, rows: int | None) -> int:
    """How many parts there are, of which a simulation has only some."""
    parts = parts_of(hidden, rows)
    return len(parts) if parts == [None] or rows is None else -(-hidden.shape[0] // rows)
