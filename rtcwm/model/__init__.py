"""The adapted H3 as functions of tensors: rows, masks, attention, adapters. Knows nothing of ranks."""
