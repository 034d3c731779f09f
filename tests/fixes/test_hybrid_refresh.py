"""Host and float32 copies follow a model that is loaded alone; restored masters stay (F12)."""

from __future__ import annotations

from typing import Any

import torch

from vime_optim.fixes import hybrid_refresh
from vime_optim.registry import around


class Hybrid:
    """Two 16-bit parameters with float32 masters, a float32 one with a copy, and one without."""

    def __init__(self) -> None:
        values = torch.tensor([1.001, -0.3333, 7.77])
        kinds = (torch.bfloat16, torch.float16, torch.float32, torch.float32)
        self.params = [values.add(n).to(kind) for n, kind in enumerate(kinds)]
        held = [torch.nn.Parameter(values.add(n)) for n in range(3)]
        self.param_to_inner_param = dict(zip(self.params, [*held, self.params[3]], strict=True))
        self.sub_optimizers = [torch.optim.AdamW(held, lr=1e-3)]

    def masters(self) -> list[torch.Tensor]:
        return [master.detach().clone() for master in self.param_to_inner_param.values()]

    def train(self) -> None:
        """A step; the parameters are what the masters round to, as Megatron leaves them."""
        for master in list(self.param_to_inner_param.values())[:3]:
            master.grad = torch.ones_like(master)
        self.sub_optimizers[0].step()
        for param, master in self.param_to_inner_param.items():
            param.copy_(master.detach().to(param.dtype))


def refresh(hybrid: Any) -> None:
    around(hybrid_refresh._refresh_masters)(None, lambda: None)(hybrid)


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> list[bool]:
    return [torch.equal(a, b) for a, b in zip(one, other, strict=True)]


def test_before_training_every_copy_follows_its_parameter() -> None:
    hybrid = Hybrid()
    refresh(hybrid)
    assert equal(hybrid.masters(), [param.float() for param in hybrid.params]) == [True] * 4


def test_masters_that_round_to_their_parameters_stay() -> None:
    hybrid = Hybrid()
    hybrid.train()
    trained = hybrid.masters()
    assert equal(trained[:2], [param.float() for param in hybrid.params[:2]]) == [False] * 2
    refresh(hybrid)
    assert equal(hybrid.masters(), trained) == [True] * 4
    hybrid.params[1].neg_()
    hybrid.params[2].neg_()
    refresh(hybrid)
    after = hybrid.masters()
    assert equal(after, trained) == [True, False, False, True]
    assert equal(after[1:3], [param.float() for param in hybrid.params[1:3]]) == [True] * 2
