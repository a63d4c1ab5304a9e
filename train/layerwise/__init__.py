"""Layerwise execution: a stack of layers run one at a time, with activation checkpoints at layer inputs."""
