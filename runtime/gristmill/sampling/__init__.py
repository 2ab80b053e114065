"""From logits to the next token of every row: per-request state and the order in which it is applied."""
