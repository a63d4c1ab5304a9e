"""The search for the smallest and fastest model that meets a goal."""
