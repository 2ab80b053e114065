"""Attention through flash-attn, version 2 or 3. backend.py: the backend; library.py: calls of either; updaters.py: their arguments."""
