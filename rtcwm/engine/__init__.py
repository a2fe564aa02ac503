"""DeepSpeed engines, ranks, activation memory and checkpoints. Knows nothing of losses."""

import os
import warnings

import torch

if not torch.cuda.is_available():
    # DeepSpeed looks for an accelerator when it is imported, and warns at every rank when it finds none.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
# DeepSpeed calls collectives under the names that torch 2.13 deprecates.
warnings.filterwarnings("ignore", message=".*is deprecated. Please use .torch.distributed", category=FutureWarning)
