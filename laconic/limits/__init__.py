"""Limits that the operating system sets this process, and what keeps to them."""
