"""One training step and its parts: the objective, the interface of techniques, which of them may be combined."""
