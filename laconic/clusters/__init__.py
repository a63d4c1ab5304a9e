"""Clusters of machines that commands run on."""
