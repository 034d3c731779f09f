"""The fixes, one module per family of faults. FIXES is the only list of them."""

from __future__ import annotations

from vime_optim.registry import Fix

FIXES: tuple[Fix, ...] = ()
