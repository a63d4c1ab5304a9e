"""Engines in processes of their own: the program that runs there, and the side of the server."""
