"""Engines that run a model. One engine a file; each imports its engine, so each is imported only when it is opened."""
