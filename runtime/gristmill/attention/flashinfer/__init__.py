"""Attention through FlashInfer. backend.py: the backend; wrappers.py: calls of the library; updaters.py: its arguments, without it."""
