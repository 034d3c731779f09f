"""A build's collection of new garbage leaves a user's own settings of gc as they are."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from vime_optim.fixes import sharding


@pytest.fixture
def frozen() -> Iterator[int]:
    gc.freeze()
    yield gc.get_freeze_count()
    gc.unfreeze()


def test_what_the_user_froze_stays_frozen(frozen: int) -> None:
    with sharding._collecting_new_garbage_only():
        assert gc.get_freeze_count() <= frozen
    assert gc.get_freeze_count() > sharding._FROZEN_AT_START


@pytest.mark.parametrize("enabled", [True, False])
def test_other_settings_stay_also_when_a_build_fails(enabled: bool) -> None:
    before = gc.isenabled(), gc.get_threshold(), gc.get_debug(), list(gc.callbacks)
    gc.unfreeze()
    try:
        if not enabled:
            gc.disable()
        during = 0
        with contextlib.suppress(KeyError), sharding._collecting_new_garbage_only():
            during = gc.get_freeze_count()
            raise KeyError
        assert during > sharding._FROZEN_AT_START
        assert gc.get_freeze_count() == 0
        assert (enabled, *before[1:]) == (
            gc.isenabled(),
            gc.get_threshold(),
            gc.get_debug(),
            list(gc.callbacks),
        )
    finally:
        if before[0]:
            gc.enable()


def test_a_freeze_in_the_barest_process_is_told_from_the_interpreters_own() -> None:
    count = "import gc; {}print(gc.get_freeze_count())"
    own, bare = (
        int(subprocess.check_output([sys.executable, "-I", "-S", "-c", count.format(freeze)]))
        for freeze in ("", "gc.freeze(); ")
    )
    assert own <= sharding._FROZEN_AT_START < bare
