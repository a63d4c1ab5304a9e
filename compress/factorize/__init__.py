"""Layers as products of smaller ones."""
