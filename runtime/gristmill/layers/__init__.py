"""Building blocks that model files share: fused linears, norms, rotary caches, the embedding, and the ops they run on."""
