"""Model families, one file each: plain PyTorch modules driven by ModelConfig."""
