"""`t2n::scan`: how a captured loop over an axis (`torch._higher_order_ops.scan`) stands in the graph."""

from __future__ import annotations

import torch

_LIBRARY = torch.library.Library("t2n", "FRAGMENT")
# `body` holds the captured graph of one step: (states, slices, constants) -> (next states, results).
_LIBRARY.define("scan(Tensor[] init, Tensor[] xs, Tensor[] constants, str body) -> Tensor[]")

SCAN = torch.ops.t2n.scan.default
