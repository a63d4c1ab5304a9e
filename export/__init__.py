"""What turns the model into an engine, and proves that it still gives the same answers."""
