"""Optimizers: frozen settings beside the code that they build. One optimizer a file."""

from laconic.training.optimizers.optimizer import Groups, Optimizer, parameter_groups

__all__ = ["Groups", "Optimizer", "parameter_groups"]
