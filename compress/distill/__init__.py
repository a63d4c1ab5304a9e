"""Knowledge distillation and healing: stages that train the model to give the original's outputs."""
