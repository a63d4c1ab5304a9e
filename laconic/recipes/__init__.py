"""Ready recipes, by what the model is for."""
