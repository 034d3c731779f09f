"""What the keys of a Megatron checkpoint mean. Pure text, from distrib_optimizer.py.

- fully_reshardable: `optimizer.state.{param,exp_avg,exp_avg_sq}.<model key>`; the older
  fully_sharded_model_space says `fp32_param` for `param`,
- dp_reshardable, flat buckets:
  `optimizer.distributed.dp_group_idx_G.gbuf_idx_B.dtype_(...).bucket_idx_K.<state>`,
  with objects such as `optimizer.distributed.dp_group_idx_G.optimizer` beside them,
- a chained optimizer may put `chained_N.` in front.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

STATES = ("param", "exp_avg", "exp_avg_sq")

_MODEL_SPACE = re.compile(r"(?P<chain>chained_\d+\.)?optimizer\.state\.(?P<state>\w+)\.(?P<key>.+)")
_BUCKET = re.compile(
    r"(?P<chain>chained_\d+\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d+)"
    r"\.gbuf_idx_(?P<buffer>\d+)\.dtype_(?P<dtype>.+)\.bucket_idx_(?P<bucket>\d+)\.(?P<state>\w+)"
)
_GROUP_OBJECT = re.compile(
    r"(?P<chain>chained_\d+\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d+)"
    r"\.(?P<name>\w+)/shard_.*"
)


@dataclass(frozen=True)
class ModelSpaceKey:
    """Optimizer state of one parameter; `state` is param, exp_avg or exp_avg_sq."""

    chain: str
    state: str
    model_key: str

    @property
    def canonical(self) -> str:
        """The key without its chain prefix, `param` for the fp32 master."""
        return f"optimizer.state.{self.state}.{self.model_key}"


@dataclass(frozen=True)
class BucketKey:
    """Optimizer state of one flat bucket."""

    chain: str
    group: int
    buffer: int
    dtype: str
    bucket: int
    state: str

    @property
    def order(self) -> tuple[str, int, int, int]:
        return (self.chain, self.group, self.buffer, self.bucket)


@dataclass(frozen=True)
class GroupObjectKey:
    """An object kept beside the buckets of one data-parallel group."""

    chain: str
    group: int
    name: str


def parse_key(key: str) -> ModelSpaceKey | BucketKey | None:
    """What an optimizer tensor's key says; None for a model tensor."""
    found = _BUCKET.fullmatch(key)
    if found is not None:
        chain, group, buffer, dtype, bucket, state = found.groups()
        return BucketKey(chain or "", int(group), int(buffer), dtype, int(bucket), state)
    found = _MODEL_SPACE.fullmatch(key)
    if found is not None:
        chain, state, model_key = found.groups()
        return ModelSpaceKey(chain or "", "param" if state == "fp32_param" else state, model_key)
    return None


def parse_object_key(key: str) -> GroupObjectKey | None:
    """What the key of an object of the distributed optimizer says; None for other objects."""
    found = _GROUP_OBJECT.fullmatch(key)
    if found is None:
        return None
    chain, group, name = found.groups()
    return GroupObjectKey(chain or "", int(group), name)
