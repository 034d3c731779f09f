"""The `torch` format on a chain with a stub: states and groups out, two steps, and back in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from vime_optim.optimizer.kinds import is_stub, owned_params, param_name
from vime_optim.optimizer.slots import slots_of
from vime_optim.optimizer.steps import read_step
from vime_optim.verify import job
from vime_optim.verify.train import train


def torch_format(payload: dict[str, Any]) -> dict[str, Any]:
    case, built = job._start(payload, loading=False)
    train(built, case.num_steps)
    folder = Path(payload["directory"])
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"states_{torch.distributed.get_rank()}.pt"
    groups = built.optimizer.state_dict()
    built.optimizer.save_parameter_state(str(file))
    saved = _held(built)
    train(built, case.total_steps)
    moved = _held(built)
    built.optimizer.load_state_dict(groups)
    built.optimizer.load_parameter_state(str(file))
    members = built.optimizer.chained_optimizers
    stubs = [member for member in members if is_stub(member)]
    return {
        "members": len(members),
        "stubs": len(stubs),
        "wrote": len(torch.load(file, weights_only=True)) if file.exists() else None,
        "direct": [stub.get_parameter_state_dp_zero() for stub in stubs],
        "differs": moved != saved,
        "same": _held(built) == saved,
        "left": [name for stub in stubs for name in vars(stub) if name == "data_parallel_group"],
    }


def _held(built: Any) -> dict[str, Any]:
    held: dict[str, Any] = {}
    for member in built.optimizer.chained_optimizers:
        if is_stub(member):
            continue
        held["step"] = read_step(member.optimizer)
        for param, _ in owned_params(member):
            for name, slot in slots_of(member, param).items():
                held[f"{param_name(member, param)}.{name}"] = slot.read().tolist()
    return held
