"""The fixes, one module per family of faults. FIXES is the only list of them."""

from __future__ import annotations

from vime_optim.fixes import (
    buckets,
    chained,
    common_state,
    finetune,
    foreign,
    formats,
    gather_free,
    gradients,
    groups,
    half_loaded,
    hybrid,
    planning,
    precision,
    restore,
    safe_read,
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
    # Later ones are outside of earlier ones: a state dict that `sharding` builds anew has the steps
    # of `chained`, and `formats` decides before either.
    *chained.FIXES,
    *sharding.FIXES,
    *common_state.FIXES,
    *safe_read.FIXES,
    *planning.FIXES,
    *gather_free.FIXES,
    *buckets.FIXES,
    *foreign.FIXES,
    *stubs.FIXES,
    *formats.FIXES,
    *writer.FIXES,
    *half_loaded.FIXES,
)
