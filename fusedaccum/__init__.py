"""fusedaccum: micro-batch gradients added up in FP32 by one fused kernel, and one update per window."""

from fusedaccum.ddp import ddp_hook
from fusedaccum.optimizer import FusedAccumOptimizer
from fusedaccum.schedulers import GatedScheduler
from fusedaccum.wrapping import wrapping

__version__ = "0.1.0"

__all__ = ["FusedAccumOptimizer", "GatedScheduler", "__version__", "ddp_hook", "wrapping"]
