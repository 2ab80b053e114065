"""Who holds which token slot and request slot: integers only, no tensors. The KV itself lives in the workers."""
