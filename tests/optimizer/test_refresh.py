"""Whether a master belongs to the parameter that is there."""

from __future__ import annotations

import torch

from vime_optim.optimizer.refresh import is_rounded_to


def test_a_master_is_its_parameter_rounded_or_not() -> None:
    master = torch.tensor([1.001, -2.5, 0.3])
    assert is_rounded_to(master, master.to(torch.bfloat16))
    assert not is_rounded_to(master, master.to(torch.bfloat16).nextafter(torch.tensor(9.0)))
    tie = torch.tensor([0x3F808000, 0x3F818000], dtype=torch.int32).view(torch.float32)
    away = torch.tensor([0x3F81, 0x3F82], dtype=torch.int16).view(torch.bfloat16)
    assert not torch.equal(tie.to(torch.bfloat16), away)
    assert is_rounded_to(tie, away)
    assert not is_rounded_to(tie + 2**-20, torch.tensor([1.0, 1.0], dtype=torch.bfloat16))
