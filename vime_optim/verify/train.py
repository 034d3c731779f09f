"""Training steps on deterministic data.

The tokens of a sample follow from its number alone (the data cursor). On top of that every step
draws from python's, numpy's and torch's global generators, so that a resume with a wrong generator
state trains on other data and is found out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from vime_optim.verify.model import GLOBAL_BATCH_SIZE, SEQUENCE_LENGTH, VOCAB_SIZE, Job


def train(job: Job, until: int, after_step: Callable[[Job], None] | None = None) -> None:
    """Step until `job.iteration` is `until`; call `after_step` after every one."""
    while job.iteration < until:
        _step(job)
        if after_step is not None:
            after_step(job)


def _step(job: Job) -> None:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    micro_batch_size = GLOBAL_BATCH_SIZE // job.layout.dp
    job.model.zero_grad_buffer()
    job.optimizer.zero_grad()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=_batches(job),
        model=[job.model],
        num_microbatches=1,
        seq_length=SEQUENCE_LENGTH,
        micro_batch_size=micro_batch_size,
        forward_only=False,
    )
    was_updated, _, _ = job.optimizer.step()
    if was_updated:  # the grad scaler found no infinite gradient
        job.scheduler.step(increment=GLOBAL_BATCH_SIZE)
    job.iteration += 1
    job.consumed_samples += GLOBAL_BATCH_SIZE


def _batches(job: Job) -> Iterator[dict[str, torch.Tensor]]:
    """This rank's one micro-batch of the next global batch."""
    from megatron.core import parallel_state

    tokens = global_batch(job.consumed_samples)
    rank = parallel_state.get_data_parallel_rank()
    size = GLOBAL_BATCH_SIZE // job.layout.dp
    mine = tokens[rank * size : (rank + 1) * size].to(job.device)
    positions = torch.arange(SEQUENCE_LENGTH, device=job.device).repeat(size, 1)
    yield {"tokens": mine[:, :-1], "labels": mine[:, 1:], "positions": positions}


def global_batch(first_sample: int) -> torch.Tensor:
    """int64 tokens of one global batch, shape (GLOBAL_BATCH_SIZE, SEQUENCE_LENGTH + 1).

    Draws from the three global generators; the same on every rank when their states are.
    """
    rows = []
    for sample in range(first_sample, first_sample + GLOBAL_BATCH_SIZE):
        generator = torch.Generator().manual_seed(sample)
        rows.append(torch.randint(VOCAB_SIZE, (SEQUENCE_LENGTH + 1,), generator=generator))
    tokens = torch.stack(rows)
    noise = torch.rand(tokens.shape) < 0.1
    shift = random.randrange(1, VOCAB_SIZE) + int(np.random.randint(1, VOCAB_SIZE))
    return torch.where(noise, (tokens + shift) % VOCAB_SIZE, tokens)


def forward_step(batches: Iterator[dict[str, torch.Tensor]], model: Any) -> Any:
    """What Megatron's schedule calls: the losses of the next micro-batch, and their mean."""
    batch = next(batches)
    losses = model(
        input_ids=batch["tokens"],
        position_ids=batch["positions"],
        attention_mask=None,
        labels=batch["labels"],
    )
    return losses, partial(_mean_loss)


def _mean_loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = losses.float().mean()
    return loss, {"loss": loss.detach()}
