"""Attention backends: the seam between models and attention libraries. See base.py for the interface, registry.py for the names."""
