"""The key/value cache: one preallocated buffer, one invariant.

    A row's token at position p lives in slot p.

Every forward writes contiguously from the row's cursor. Slots from the cursor on are dead: a query at position p reads
slots <= p only, and the next forward overwrites them before it could read them. So nothing is ever copied, shifted or
erased: accepting tokens moves the cursor forward, rolling back moves it backward, and rows of one batch may stand at
different places. (Paper section 3.4 has the cache; the invariant is ours.)
"""

import copy

import torch


class KVCache:
    """Keys and values of every layer for `batch` rows of up to `max_len` positions.

    `k`, `v` (layers, N, max_len, K, hd): N rows, K key/value heads of head_dim hd; T is the number of new positions of a forward, S
    that of slots it may read.
    `cursor` (N,) int64 lives on the CPU, so planning a step never waits for the device.
    """

    def __init__(self, config, batch: int, max_len: int, dtype=None, device=None):
        shape = (config.num_hidden_layers, batch, max_len, config.num_key_value_heads, config.head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)  # zeros, not empty: a dead slot weighs 0, and 0 * nan is nan
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.cursor = torch.zeros(batch, dtype=torch.long)
        self.max_len, self.length = max_len, 0                                   # length: S of the forward that was planned

    def positions(self, n: int) -> torch.Tensor:
        """(N, n) on the CPU: the next n positions of every row, from its cursor."""
        return self.cursor[:, None] + torch.arange(n)

    def advance(self, n) -> None:
        """Commit n tokens (an int, or one per row as (N,)): what lies before the cursor is what later forwards see."""
        self.cursor += n

    def row(self, i: int) -> "KVCache":
        """Row i as a cache of its own that shares this one's memory and cursor: what is written there is written here."""
        part = copy.copy(self)
        part.k, part.v, part.cursor = self.k[:, i : i + 1], self.v[:, i : i + 1], self.cursor[i : i + 1]
        return part

    def plan(self, positions: torch.Tensor):
        """Once per forward: where new keys go and what each query may see.

        positions (N, T) -> slots (N*T,) into the flattened (N, max_len) rows, and mask (N, T, S), True = may attend, with S
        = the last position + 1. For a first forward, all rows at 0..T-1, the mask is None: plain causal. Positions are
        looked at on the CPU, so give them there and no device is waited for. `write` uses the S of the last plan. Raises ValueError
        outside the cache.
        """
        first, last = int(positions.min()), int(positions.max())
        if first < 0 or last >= self.max_len:
            raise ValueError(f"KV cache holds positions 0..{self.max_len - 1}, asked to write {first}..{last}")
        self.length = last + 1                                                   # S
        from_zero = positions.shape[1] == self.length and bool((positions[:, 0] == 0).all())
        positions = positions.to(self.k.device)
        row = torch.arange(positions.shape[0], device=positions.device)[:, None]
        slots = (row * self.max_len + positions).flatten()                       # (N*T,)
        slot = torch.arange(last + 1, device=positions.device)                   # (S,)
        return slots, None if from_zero else slot <= positions[..., None]    # (N, T, S)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor):
        """Store k, v (N, T, K, hd) and return views (N, S, K, hd) of what the layer has so far; S as planned."""
        for buffer, new in ((self.k[layer], k), (self.v[layer], v)):
            buffer.view(-1, *new.shape[2:]).index_copy_(0, slots, new.reshape(-1, *new.shape[2:]).to(buffer.dtype))
        return self.k[layer][:, : self.length], self.v[layer][:, : self.length]
