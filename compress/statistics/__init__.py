"""Calibration statistics of a model's layers: input moments, gradients, and least-squares fits on them."""
