"""Validation: whether an artifact still answers as the original does, and how sure that is."""
