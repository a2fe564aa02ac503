"""DeepSpeed engines, ranks, activation memory and checkpoints. Knows nothing of losses."""
