"""The fixes, one module per family of faults. FIXES is the only list of them."""

from __future__ import annotations

from vime_optim.fixes import (
    buckets,
    chained,
    common_state,
    finetune,
    foreign,
    gather_free,
    gradients,
    groups,
    hybrid,
    planning,
    precision,
    restore,
    sharding,
    step,
    stubs,
    writer,
)
from vime_optim.registry import Fix

FIXES: tuple[Fix, ...] = (
    *step.FIXES,
    *groups.FIXES,
    *restore.FIXES,
    *precision.FIXES,
    *hybrid.FIXES,
    *gradients.FIXES,
    *finetune.FIXES,
    *sharding.FIXES,
    *common_state.FIXES,
    *planning.FIXES,
    *gather_free.FIXES,
    *buckets.FIXES,
    *chained.FIXES,
    *foreign.FIXES,
    *stubs.FIXES,
    *writer.FIXES,
)
