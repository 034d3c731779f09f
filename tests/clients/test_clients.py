"""The real pretrain_gpt.py with install(), resumed, against itself uninterrupted, bit by bit."""

from __future__ import annotations

import pytest

from clients.cases import CASES, HALF, OLD, Case
from clients.client import RunFailed, run_case
from clients.pool import Pool
from clients.trees import TREES, NoTree


def every_case() -> list[object]:
    parameters: list[object] = []
    for tree in TREES:
        for case in CASES:
            if tree not in case.trees:
                continue
            marks = [] if tree in case.spread else [pytest.mark.clients]
            parameters.append(pytest.param(tree, case, id=f"{tree}-{case.name}", marks=marks))
    return parameters


@pytest.mark.parametrize(("tree", "case"), every_case())
def test_resumes_exactly(pool: Pool, tree: str, case: Case) -> None:
    try:
        template = pool.template_of(case, tree)
    except NoTree as missing:
        pytest.skip(str(missing))
    assert run_case(template, case) == []


def test_stock_is_told_from_a_right_resume(pool: Pool) -> None:
    """The same comparison on stock, which resumes this case wrongly (F3, F4)."""
    case = Case("half-stock", HALF, install="no")
    try:
        template = pool.template_of(case, OLD)
    except NoTree as missing:
        pytest.skip(str(missing))
    try:
        found = run_case(template, case)
    except RunFailed as error:
        found = [str(error)]
    assert found != []
