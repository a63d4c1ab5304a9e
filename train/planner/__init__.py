"""Prediction of the memory and the time of a training step, and the plan of the techniques that fit."""
