"""Optimiser over bfloat16 modules: float32 masters, Muon for the matrices, AdamW for the rest."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

MAX_NORM = 1.0
MUON_GAIN = 2.0


class MasterOptimizer:
    """Keeps float32 masters of the trained parameters and writes them back rounded after each step.

    Hidden matrices are moved by Muon (orthogonalised momentum), all others by
    AdamW. ``lr`` of ``step`` scales both.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], *, weight_decay: float = 0.02) -> None:
        pairs = [(name, p) for name, p in named if p.requires_grad]
        self._params = [p for _, p in pairs]
        self.masters: list[Tensor] = [p.detach().float().clone() for p in self._params]
        matrices = [m for (n, _), m in zip(pairs, self.masters, strict=True) if is_hidden_matrix(n, m)]
        others = [m for (n, _), m in zip(pairs, self.masters, strict=True) if not is_hidden_matrix(n, m)]
        self._optimizers: list[torch.optim.Optimizer] = []
        if others:
            self._optimizers.append(
                torch.optim.AdamW(others, lr=1e-3, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
            )
        if matrices:
            self._optimizers.append(
                torch.optim.Muon(matrices, lr=1e-3, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
            )

    def step(self, lr: float) -> float:
        """Move the masters by the gradients, round them into the parameters; returns the gradient's norm."""
        for master, param in zip(self.masters, self._params, strict=True):
            grad = param.grad
            master.grad = torch.zeros_like(master) if grad is None else grad.float()
            param.grad = None
        norm = float(torch.nn.utils.clip_grad_norm_(self.masters, MAX_NORM))
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * (MUON_GAIN if isinstance(optimizer, torch.optim.Muon) else 1)
            optimizer.step()
        with torch.no_grad():
            for param, master in zip(self._params, self.masters, strict=True):
                param.copy_(master)
        return norm


def is_hidden_matrix(name: str, value: Tensor) -> bool:
    """Whether Muon moves it: a linear layer between hidden states, no embedding and no read-out."""
    return value.ndim == 2 and not any(part in name for part in ("embed", "pos_embed", "reader", "writer"))
