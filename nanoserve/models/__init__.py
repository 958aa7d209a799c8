"""Model families as plain modules, one file each: `forward(token_ids, positions, cache)` and `compute_logits`."""
