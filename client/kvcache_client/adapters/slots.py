"""A transformers cache over a turn's buffer: KV is written into its own column, nothing is ever concatenated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


class SlotLayer(DynamicLayer):
    """One layer's K and V as views of the buffer. `positions` says where the next update is written."""

    def __init__(self, kv: Tensor) -> None:
        """kv: [2, columns, kv_heads, head_dim]."""
        super().__init__()
        self._kv = kv
        self.is_initialized = True
        self.dtype, self.device = kv.dtype, kv.device
        self.positions = torch.empty(0, dtype=torch.long)
        self.length = 0
        self._view()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """key_states, value_states: [1, kv_heads, len(positions), head_dim]. Returns all columns up to `length`."""
        self._kv[0, self.positions] = key_states[0].transpose(0, 1)
        self._kv[1, self.positions] = value_states[0].transpose(0, 1)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.length - len(self.positions)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length, 0

    def aim(self, positions: Tensor, length: int) -> None:
        """The next forward writes `positions` and sees `length` columns."""
        self.positions, self.length = positions, length
        self._view()

    def _view(self) -> None:
        self.keys = self._kv[0, : self.length].transpose(0, 1)[None]
        self.values = self._kv[1, : self.length].transpose(0, 1)[None]


class SlotCache(DynamicCache):
    """All layers over one buffer [layers, 2, columns, kv_heads, head_dim]."""

    def __init__(self, buffer: Tensor) -> None:
        super().__init__()
        self.buffer = buffer
        self.layers = [SlotLayer(buffer[index]) for index in range(len(buffer))]

    @torch.no_grad()
    def forward(self, model: Any, token_ids: Tensor, positions: Tensor, length: int, *, logits: int) -> Tensor:
        """Run `token_ids` [n] at ascending `positions` [n] in one forward; every token sees the columns before it.

        All columns below `length` that are not in `positions` must hold KV already. Returns the last `logits` rows.
        """
        assert len(token_ids) == len(positions) > 0
        assert int(positions[-1]) == length - 1, "the last column must be computed: a full cache generates wrong text"
        for layer in self.layers:
            layer.aim(positions, length)
        contiguous = len(positions) == length
        mask = None if contiguous or len(positions) == 1 else _mask(positions, length, self.buffer.dtype)
        out = model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            attention_mask=mask,
            cache=self,
            use_cache=True,
            logits_to_keep=logits,
        )
        rows: Tensor = out.logits[0]
        return rows


def _mask(positions: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Additive mask [1, 1, queries, length]: a query at position n sees columns 0 … n."""
    hidden = torch.arange(length)[None] > positions[:, None]
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min)[None, None]
