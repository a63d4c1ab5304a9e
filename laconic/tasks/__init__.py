"""What a model is for: how raw data becomes tensors and back, and which figures count. One task a file."""
