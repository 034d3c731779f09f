"""What we noted about an optimizer goes where the optimizer goes."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from vime_optim.optimizer.record import canonical, record_of


class Optimizer:
    pass


def test_a_copy_has_a_record_of_its_own() -> None:
    optimizer = Optimizer()
    param = torch.nn.Parameter(torch.ones(2))
    record = record_of(optimizer)
    record.half_loaded_from = "here"
    record.stock_group_map = {param: (0, 1)}
    record.restored[7] = (1, 2)
    for made in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        theirs = record_of(made)
        assert theirs is not record
        assert theirs.half_loaded_from == "here"
        assert [*(theirs.stock_group_map or {}).values()] == [(0, 1)]
        theirs.restored.clear()
        theirs.half_loaded_from = None
    assert record.restored == {7: (1, 2)}
    assert record_of(optimizer) is record
    assert record.half_loaded_from == "here"
    assert record_of(copy.copy(optimizer)) is record, "as every attribute of a shallow copy"


def test_no_two_optimizers_share_one() -> None:
    one, other = Optimizer(), Optimizer()
    record_of(one).fits[1] = "differs"

    def fail_within() -> None:
        with canonical(one):
            assert record_of(one).is_canonical
            assert not record_of(other).is_canonical
            raise LookupError

    with pytest.raises(LookupError):
        fail_within()
    assert not record_of(one).is_canonical
    assert record_of(other).fits == {}
