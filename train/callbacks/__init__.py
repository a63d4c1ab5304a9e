"""Observers of a training run: progress, logs, TensorBoard, traces, energy, FLOPs."""
