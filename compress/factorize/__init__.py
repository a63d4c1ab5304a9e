"""Factorization: layers replaced by sequences of smaller ones."""
