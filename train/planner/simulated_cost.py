"""The parts of a simulated step's cost that its operations do not tell."""

from torch.distributed.device_mesh import DeviceMesh

from train.parallel.mesh import Axis
from train.parallel.ranks import Ranks
from train.planner.device_rates import DeviceRates, measure_optimizer
from train.planner.step_cost import StepCost
from train.settings import TrainingComponents
from train.step.train_state import TrainState


def name_groups(ranks: Ranks) -> dict[str, Axis]:
    """Return the axes of the ranks by the names of their process groups."""
    axes: dict[Axis, DeviceMesh | None] = {"context": ranks.context}
    axes |= {"shard": ranks.select_axes("shard"), "tensor": ranks.select_axes("tensor")}
    return {str(axis.get_group().group_name): name for name, axis in axes.items() if axis is not None}


def cost_optimizer(state: TrainState, parts: TrainingComponents, metered: StepCost, rates: DeviceRates) -> StepCost:
    """Compute the cost of the optimizer's step, from its measured time per parameter on the side where it steps."""
    count = sum(parameter.numel() for group in state.optimizer.param_groups for parameter in group["params"])
    if metered.host > metered.device:
        return StepCost(host=count * measure_optimizer(parts.optimizer, rates.host or rates))
    return StepCost(device=count * measure_optimizer(parts.optimizer, rates))
