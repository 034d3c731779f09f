"""The common state holds no classes and no steps, and is read under weights_only.

Symptom: a load fails on optimizer classes (F9) or lists of steps (F2) in the common state.
Cause: HybridDeviceOptimizer's defaults are copied into its param groups; a step that is no
ShardedTensor counts as common state, which rank 0 alone writes.
Changes: while Megatron reads the common state, inert placeholders stand for optimizer classes (none
is imported, none allowed globally); what was read is cleared of classes and of param state.
Leaves alone: everything else in the common state.
Remove when: no checkpoint of megatron-core 0.15 to 0.18 is left.
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections.abc import Iterator
from typing import Any

import torch

from vime_optim import state_dicts
from vime_optim.errors import CheckpointError
from vime_optim.fixes.places import SERIALIZATION, STRATEGIES
from vime_optim.registry import Fix, Hit, takes

_LIMIT_BYTES = 1 << 30
_NO_WEIGHTS_ONLY = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
_thread = threading.local()
_COMMON = f"{STRATEGIES}.common"


FIX = Fix(
    id="common-state",
    faults=("F2", "F9"),
    summary="the common state is read under weights_only, without classes and stray steps",
)


@FIX.wraps(
    f"{_COMMON}:TorchCommonLoadStrategy", "load_common", takes("checkpoint_dir"), optional=True
)
@FIX.wraps(_COMMON, "load_common", takes("checkpoint_dir"), optional=True)
@FIX.wraps(SERIALIZATION, "load_common_state_dict", takes("checkpoint_dir"))
def _load_common(original: Any, hit: Hit, *args: Any, **kwargs: Any) -> Any:
    from vime_optim.commit import load_check
    from vime_optim.files.objects import also_allowed

    hit()
    if getattr(_thread, "reading", False):  # one of the functions here calls another
        return original(*args, **kwargs)
    # Positional in a method and in a function alike: the directory is the last of the two.
    directory = kwargs.get("checkpoint_dir", args[-1] if args else "")
    stand_ins = _stand_ins(os.path.join(str(directory), "common.pt"))
    with (
        also_allowed(stand_ins),
        _read_under_weights_only(),
        load_check.errors_of_ours(str(directory)),
    ):
        state = original(*args, **kwargs)
    mend_common_state(state)
    return state


def _stand_ins(path: str) -> list[Any]:
    """(placeholder, dotted name) for the optimizer classes that a common state may name.

    A run may use an optimizer class that nobody foresaw, so the file is asked (its pickle is read,
    not run) what it names beyond what torch and Megatron allow. A placeholder does nothing; one
    that turns up anywhere but as an option of a param group is refused afterwards.
    """
    from vime_optim.files.plain import no_archive, read_plain
    from vime_optim.files.safe_load import OPTIMIZER_CLASSES, audited_names
    from vime_optim.files.stand_ins import inert_class

    names = set(OPTIMIZER_CLASSES)
    try:
        data = read_plain(path, _LIMIT_BYTES)
    except FileNotFoundError:
        data = None  # part of the sharded state from 0.19 on
    if data is not None:
        try:
            audited_names(data, _LIMIT_BYTES)
            unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data))
            names |= set(unsafe)
        except Exception as error:
            raise no_archive(path, error) from None
    return [(inert_class(name), name) for name in sorted(names)]


@contextlib.contextmanager
def _read_under_weights_only() -> Iterator[None]:
    """Whatever the environment says: TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD would run the file's code."""
    forced = os.environ.pop(_NO_WEIGHTS_ONLY, None)
    _thread.reading = True
    try:
        yield
    finally:
        _thread.reading = False
        if forced is not None:
            os.environ[_NO_WEIGHTS_ONLY] = forced


def mend_common_state(state: Any) -> list[str]:
    """Clear a loaded common state, in place, of classes and of param state.

    Returns:
        The dotted paths that were removed.

    Raises:
        CheckpointError: it names a class outside of its param groups, or its param state holds
            more than steps: neither can be dropped.
    """
    return _strip_classes(state) + _strip_param_state(state)


def _strip_classes(state: Any) -> list[str]:
    from vime_optim.files.safe_load import walk
    from vime_optim.files.stand_ins import Inert, is_inert_class

    removed = []
    for parent, key, item, path in walk(state):
        if is_inert_class(item) and isinstance(parent, dict) and "param_groups" in path:
            removed.append(path)
            del parent[key]
        elif is_inert_class(item) or isinstance(item, Inert):
            raise CheckpointError(
                "the common state names a class that weights_only does not allow",
                where=path,
                got=repr(item),
                expected="plain values; classes only as options of param groups, where they are"
                " dropped",
                next_step="if you trust the checkpoint, allow this very class with"
                " torch.serialization.add_safe_globals; nothing was run",
            )
    return removed


def _strip_param_state(state: Any) -> list[str]:
    removed: list[str] = []
    for path, value in state_dicts.walk(state):
        if isinstance(value, dict) and {"param_state", "param_state_sharding_type"} <= value.keys():
            dotted = ".".join(map(str, (*path, "param_state")))
            _require_only_steps(value["param_state"], dotted)
            del value["param_state"]
            removed.append(dotted)
    return removed


def _require_only_steps(value: Any, path: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if key not in ("step", "padding", "per_bucket_numel", "per_bucket_numel_unpadded"):
                _require_only_steps(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _require_only_steps(item, f"{path}.{index}")
    else:
        raise CheckpointError(
            "the common state holds param state that is no step",
            where=path,
            got=type(value).__name__,
            expected="step counters alone, as trees with the `continue` patch leave them",
            next_step="inspect the checkpoint with `vime-optim inspect`; nothing was loaded",
        )
