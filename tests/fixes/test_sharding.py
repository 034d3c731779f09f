"""Which sharding type a save and a load get: every policy, type and kind of optimizer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from vime_optim import settings
from vime_optim.errors import OptimizerStateError
from vime_optim.fixes import sharding
from vime_optim.fixes.sharding import settle_type

FULLY = "fully_reshardable"
BUCKETS = "dp_reshardable"
DEAD = "fully_sharded_model_space"
FSDP = "fsdp_dtensor"


def optimizer_config(*, pao: bool, offload: bool) -> SimpleNamespace:
    """The two options that the choice depends on, as OptimizerConfig and Megatron's args have."""
    return SimpleNamespace(use_precision_aware_optimizer=pao, optimizer_cpu_offload=offload)


CONCERNED = optimizer_config(pao=True, offload=True)
OTHERS = (
    optimizer_config(pao=True, offload=False),
    optimizer_config(pao=False, offload=True),
    optimizer_config(pao=False, offload=False),
    SimpleNamespace(),  # an older config, without the options
    SimpleNamespace(use_precision_aware_optimizer=True),
    SimpleNamespace(optimizer_cpu_offload=True),
    None,
)


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Sets VIME_OPTIM_SHARDING for the test."""
    before = settings.current()
    monkeypatch.setattr(sharding, "_warned", False)
    yield lambda value: settings.activate(settings.Settings(sharding=value))
    settings.activate(before)


@pytest.mark.parametrize(
    ("rule", "requested", "saved_as"),
    [
        ("enforce", None, FULLY),
        ("enforce", FULLY, FULLY),
        ("enforce", BUCKETS, FULLY),
        ("enforce", DEAD, FULLY),
        ("enforce", FSDP, FSDP),
        ("error", None, FULLY),
        ("error", FULLY, FULLY),
        ("error", BUCKETS, "refused"),
        ("error", DEAD, FULLY),
        ("error", FSDP, FSDP),
        ("off", None, FULLY),
        ("off", FULLY, FULLY),
        ("off", BUCKETS, BUCKETS),
        ("off", DEAD, FULLY),
        ("off", FSDP, FSDP),
    ],
)
def test_a_save_under_pao_with_cpu_offload(
    rule: str, requested: str | None, saved_as: str, policy: Callable[[str], None]
) -> None:
    policy(rule)
    if saved_as == "refused":
        with pytest.raises(OptimizerStateError, match="VIME_OPTIM_SHARDING=enforce") as caught:
            settle_type(CONCERNED, requested, False)
        assert (caught.value.got, caught.value.expected) == (BUCKETS, FULLY)
    else:
        assert settle_type(CONCERNED, requested, False) == saved_as


@pytest.mark.parametrize("rule", ["enforce", "error", "off"])
@pytest.mark.parametrize("config", OTHERS)
@pytest.mark.parametrize(
    ("requested", "saved_as"),
    [(None, FULLY), (FULLY, FULLY), (BUCKETS, BUCKETS), (DEAD, FULLY), (FSDP, FSDP)],
)
def test_a_save_of_any_other_optimizer_is_what_was_asked(
    rule: str,
    config: SimpleNamespace | None,
    requested: str | None,
    saved_as: str,
    policy: Callable[[str], None],
) -> None:
    policy(rule)
    assert settle_type(config, requested, False) == saved_as


@pytest.mark.parametrize("rule", ["enforce", "error", "off"])
@pytest.mark.parametrize("config", [CONCERNED, *OTHERS])
@pytest.mark.parametrize(
    ("requested", "loaded_as"),
    [(None, FULLY), (FULLY, FULLY), (BUCKETS, BUCKETS), (DEAD, DEAD), (FSDP, FSDP)],
)
def test_a_load_keeps_what_was_asked(
    rule: str,
    config: SimpleNamespace | None,
    requested: str | None,
    loaded_as: str,
    policy: Callable[[str], None],
) -> None:
    """The checkpoint decides about a load; `requested` only says what to build first."""
    policy(rule)
    assert settle_type(config, requested, True) == loaded_as


def test_the_other_type_is_said_once(
    policy: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    policy("enforce")
    with caplog.at_level(logging.WARNING, logger="vime_optim"):
        for _ in range(3):
            settle_type(CONCERNED, BUCKETS, False)
        settle_type(OTHERS[0], BUCKETS, False)
    (record,) = caplog.records
    assert f"{FULLY}, not {BUCKETS}" in record.getMessage()
