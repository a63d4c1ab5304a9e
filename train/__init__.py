"""Training: one loop and what it is made of, memory techniques, the planner, and fine-tuning."""
