"""Memory techniques, one a module: each replaces the part of a training step that its slot names."""
