"""Running a stack of layers one at a time, forward and backward, with activations kept only as layer inputs."""
