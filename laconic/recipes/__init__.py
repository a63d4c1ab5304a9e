"""Recipes: their YAML format, stages, goals, sample splits, and the ready recipes by task."""
