"""Predicts what an engine would do: the real scheduler against a cost model of the worker and a virtual clock."""
