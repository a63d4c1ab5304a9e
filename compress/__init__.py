"""What makes the model smaller."""
