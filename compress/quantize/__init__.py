"""Quantization: what it decides is a Plan."""
