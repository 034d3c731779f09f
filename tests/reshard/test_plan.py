"""Plans: local checks, cover over all ranks, digests, and what a load must read."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vime_optim.errors import PlanError
from vime_optim.reshard.keys import (
    KeyInfo,
    differing_plans,
    digest_of,
    first_difference,
    rank_list,
)
from vime_optim.reshard.plan import (
    ParamRun,
    Piece,
    RankPlan,
    check_cover,
    check_local,
    pieces_of_range,
)


def piece(offset, size, shape, key="w", replica=0, start=0):
    return Piece(offset, size, key, shape, replica, key, "param", start)


def cut_target(target, dp, state="param"):
    """(rank, piece) of a target cut into `dp` flat ranges of nearly one length."""
    numel = int(np.prod(target.local_shape, dtype=int))
    borders = [numel * rank // dp for rank in range(dp + 1)]
    for rank in range(dp):
        for one in pieces_of_range(
            target, borders[rank], borders[rank + 1], param="p", state=state
        ):
            yield rank, one


# --- pieces_of_range


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_pieces_address_the_elements_that_the_shard_holds(data):
    local = tuple(data.draw(st.lists(st.integers(1, 4), max_size=3)))
    prepended = data.draw(st.integers(0, 2))
    extra = tuple(data.draw(st.integers(0, 2)) for _ in local)
    offset = tuple(data.draw(st.integers(0, 3)) for _ in range(prepended))
    offset += tuple(data.draw(st.integers(0, e)) for e in extra)
    shape = (4,) * prepended + tuple(n + e for n, e in zip(local, extra, strict=True))
    numel = int(np.prod(local, dtype=int))
    flat_start = data.draw(st.integers(0, 5))
    param_numel = flat_start + numel + data.draw(st.integers(0, 5))
    start, end = sorted(data.draw(st.integers(0, param_numel)) for _ in range(2))
    target = ParamRun("k", shape, offset, local, flat_start, (0, 1, 0))

    # Brute force: write each element's shard position into the global tensor, one by one.
    expected = np.full(shape, -1)
    window = tuple(slice(o, o + 1) for o in offset[:prepended])
    window += tuple(slice(o, o + n) for o, n in zip(offset[prepended:], local, strict=True))
    values = np.arange(flat_start, flat_start + numel)
    inside = (values >= start) & (values < end)
    run = np.where(inside, values - start, -1)
    expected[window] = run.reshape((1,) * prepended + local)

    got = np.full(shape, -1)
    for p in pieces_of_range(target, start, end, param="p", state="s"):
        box = tuple(slice(o, o + n) for o, n in zip(p.offset, p.size, strict=True))
        assert (got[box] == -1).all()
        positions = np.arange(p.start_elem, p.start_elem + p.numel)
        got[box] = positions.reshape(p.size)
        assert (p.key, p.global_shape, p.replica_id) == ("k", shape, (0, 1, 0))
        assert not p.is_main_replica
    assert np.array_equal(got, expected)


# --- check_cover and check_local


@pytest.mark.parametrize("wrong", ["a", "b", "c"])
def test_every_key_of_one_rank_is_checked(wrong):
    keys = ("a", "b", "c")
    pieces = [piece((0,), (2,), (4,), key=key) for key in keys]
    check_local(RankPlan(0, tuple(pieces)))
    twice = [*pieces, piece((1,), (2,), (4,), key=wrong)]
    with pytest.raises(PlanError, match="the same elements twice") as caught:
        check_local(RankPlan(0, tuple(twice)))
    assert str(caught.value.where).startswith(f"{wrong}, ")


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), st.integers(1, 40), st.integers(1, 7), st.integers(1, 7))
def test_tensor_parallel_columns_cut_by_data_parallel_ranges_cover(tp, dp, rows, columns):
    pieces = []
    for rank in range(tp):
        target = ParamRun("w", (2, rows, columns * tp), (1, 0, rank * columns), (rows, columns))
        other = replace(target, global_offset=(0, 0, rank * columns))
        for t in (target, other):
            pieces += [(rank * dp + r, p) for r, p in cut_target(t, dp)]
    shape = (2, rows, columns * tp)
    check_cover("w", shape, pieces)
    without = pieces[1:]
    with pytest.raises(PlanError, match="incomplete"):
        check_cover("w", shape, without)
    with pytest.raises(PlanError, match="twice"):
        check_cover("w", shape, [*pieces, (99, pieces[0][1])])


def test_a_gap_names_key_range_and_shape():
    pieces = [(0, piece((0, 0), (2, 4), (4, 4))), (1, piece((3, 0), (1, 4), (4, 4)))]
    with pytest.raises(PlanError) as caught:
        check_cover("w", (4, 4), pieces)
    text = str(caught.value)
    assert "w, [2:3, 0:4] of shape (4, 4)" in text
    assert "written by no rank" in text


def test_an_overlap_names_both_ranks():
    pieces = [(3, piece((0, 0), (3, 4), (4, 4))), (7, piece((2, 0), (2, 4), (4, 4)))]
    with pytest.raises(PlanError) as caught:
        check_cover("w", (4, 4), pieces)
    text = str(caught.value)
    assert "w, [2:3, 0:4]" in text
    assert "ranks 3 and 7" in text or "ranks 7 and 3" in text


def test_replicas_do_not_count():
    whole = piece((0,), (4,), (4,))
    check_cover("w", (4,), [(0, whole), (1, replace(whole, replica_id=(0, 1, 0)))])
    with pytest.raises(PlanError, match="incomplete"):
        check_cover("w", (4,), [(1, replace(whole, replica_id=1))])


def test_a_scalar_is_covered_by_one_piece():
    one = piece((), (), ())
    check_cover("w", (), [(0, one)])
    with pytest.raises(PlanError, match="incomplete"):
        check_cover("w", (), [])
    with pytest.raises(PlanError, match="twice"):
        check_cover("w", (), [(0, one), (1, one)])


@pytest.mark.parametrize(
    "wrong",
    [
        {"offset": (3,)},
        {"offset": (1,)},
        {"offset": (-1,)},
        {"size": (0,)},
        {"size": (2, 2)},
        {"global_shape": (5,)},
    ],
)
def test_unsound_pieces_are_refused(wrong):
    good = piece((0,), (4,), (4,))
    bad = replace(good, **wrong)
    check_local(RankPlan(0, (good,)))
    with pytest.raises(PlanError, match="does not fit"):
        check_cover("w", (4,), [(5, bad)])
    if "global_shape" not in wrong:
        with pytest.raises(PlanError, match="rank 5"):
            check_local(RankPlan(5, (bad,)))


def test_local_overlap_is_refused_and_local_gap_is_not():
    left, right = piece((0,), (2,), (6,)), piece((3,), (2,), (6,), start=2)
    check_local(RankPlan(0, (left, right)))
    clash = piece((1,), (3,), (6,), start=7)
    with pytest.raises(PlanError, match=r"w, \[1:2\]"):
        check_local(RankPlan(0, (left, right, clash)))


# --- digests and keys

KEYS = (KeyInfo("a", (4, 2)), KeyInfo("b", (3,)))


def test_digest_covers_keys_in_any_order():
    assert digest_of(KEYS) == digest_of(KEYS[::-1]) == digest_of(KEYS + KEYS)
    other = [
        KEYS[:1],
        (KEYS[0]._replace(key="c"), KEYS[1]),
        (KEYS[0]._replace(global_shape=(42,)), KEYS[1]),
    ]
    assert len({digest_of(keys) for keys in [KEYS, *other]}) == 1 + len(other)
    # Fixed for good: ranks may run different builds of Python.
    assert digest_of(KEYS) == "39d2b51c1e41a0b8"


def test_differing_digests_group_the_ranks():
    error = differing_plans(["ab12", "ab12", "ab12", "cd34", "ab12"], range(5), [KEYS] * 5)
    assert "digest ab12: ranks 0-2,4; digest cd34: rank 3" in str(error)


def test_differing_digests_name_the_first_differing_key():
    changed = (KEYS[0], KEYS[1]._replace(global_shape=(5,)))
    text = str(differing_plans(["x", "y", "x"], [4, 6, 8], [KEYS, changed, KEYS]))
    assert "b: (3,) on ranks 4,8; (5,) on rank 6" in text
    assert "digest x: ranks 4,8; digest y: rank 6" in text


def test_first_difference():
    assert first_difference([KEYS, KEYS[::-1]], [0, 1]) is None
    assert first_difference([KEYS, KEYS[1:]], [0, 1]) == "a: (4, 2) on rank 0; absent on rank 1"


def test_rank_list():
    assert rank_list([3]) == "rank 3"
    assert rank_list([4, 0, 1, 2]) == "ranks 0-2,4"
    assert rank_list([1, 3]) == "ranks 1,3"
