"""The model worker (process D): weights, KV tensors, forward passes and sampling, driven by the scheduler's Steps."""
