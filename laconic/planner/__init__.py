"""How much memory a training step takes, said beforehand."""
