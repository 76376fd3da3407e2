"""Models that torch.distributed shares among ranks."""

from __future__ import annotations

import gc

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fusedaccum.options import NAME


def check_not_reduced(params: list[Tensor]) -> None:
    """Refuse parameters of a DistributedDataParallel model on several ranks: it has not reduced their gradients when
    hooks see them, and ranks would part without a word. Raises RuntimeError.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return
    mine = set(map(id, params))
    models = [m for m in gc.get_objects() if isinstance(m, DistributedDataParallel)]  # nothing else knows of them
    if any(id(p) in mine for model in models for p in model.module.parameters()):
        raise RuntimeError(
            f"{NAME}: fold='backward' folds gradients before DistributedDataParallel has reduced them over its "
            f"{distributed.get_world_size()} ranks; use fold='step', which reads them after that"
        )
