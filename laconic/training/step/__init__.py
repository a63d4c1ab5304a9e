"""One training step and its parts: the objective, the technique interface, what may be combined."""
