"""Placement rules per engine, one file each."""
