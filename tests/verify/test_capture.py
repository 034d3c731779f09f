from __future__ import annotations

import torch

from vime_optim.simulate.fused_adam import master_from_remainder


def test_a_master_from_bf16_and_remainder_follows_transformer_engines_rule() -> None:
    """Master bits: (bf16 bits - (remainder < 0)) << 16 | remainder & 0xFFFF."""
    torch.manual_seed(0)
    master = torch.cat([torch.randn(1000), torch.tensor([0.0, -0.0, 1e-40, -3.4e38, 1.0])])
    bits = [value & 0xFFFFFFFF for value in master.view(torch.int32).tolist()]
    low = [value & 0xFFFF for value in bits]
    remainder = [value - 0x10000 if value & 0x8000 else value for value in low]
    high = [((value >> 16) + (value >> 15 & 1)) & 0xFFFF for value in bits]
    stored = torch.tensor([value - 0x10000 if value & 0x8000 else value for value in high])

    got = master_from_remainder(
        stored.to(torch.int16).view(torch.bfloat16), torch.tensor(remainder, dtype=torch.int16)
    )

    assert torch.equal(got.view(torch.int32), master.view(torch.int32))
