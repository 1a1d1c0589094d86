"""What hands a recurrent state from a cache to the recurrence that a layer runs."""

from __future__ import annotations

import pickle

import torch

from kvcache.recurrent import LastRead


def test_a_state_is_taken_whole_or_head_by_head() -> None:
    """Zamba's layers run their heads one after another, and keep them in one tensor."""
    last, state = LastRead(), torch.randn(1, 2, 3, 4)
    assert last.take(3) is None
    last.note(state)
    assert last.take(4) is state
    torch.testing.assert_close(last.take(3), state[:, 0])
    torch.testing.assert_close(last.take(3), state[:, 1])
    last.note(state + 1)  # the next layer begins with its first head
    torch.testing.assert_close(last.take(3), state[:, 0] + 1)
    assert pickle.loads(pickle.dumps(last)).take(4) is None
