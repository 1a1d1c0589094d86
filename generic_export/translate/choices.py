"""What a target decides about the way a graph is spelled; the translations ask, and never know which target it is.

In: nothing; a target makes these. Out: read through `NnefBuilder.numerics` and `NnefBuilder.spelling`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Numerics:
    """Where an f16 graph computes in f32 although PyTorch's own graph would not have to.

    Attributes:
        f32_linear_accumulation: matrix products accumulate, and leave, in f32 before they are rounded.
        f32_attention: query, key and value are widened, so that the whole attention is computed in f32.
        f32_norm: a norm's input, scale and shift are widened, so that it is rounded once, at its end.
    """

    f32_linear_accumulation: bool = False
    f32_attention: bool = False
    f32_norm: bool = False


@dataclass(frozen=True)
class Spelling:
    """Which of two ways to say the same thing is written.

    Attributes:
        streamed: the symbol of an axis that comes in pieces: loops along it go on where they ended; "" for none.
        attention_operator: attention is one operator of the engine; otherwise products, softmax and masks.
        attention_products: attention over a cache is two grouped products that read it once, in the place of that operator.
        attention_padding: attention over f16 heads of a size that the device's kernel has is the operator, with keys and values
            padded (`ops/padded_attention.py`); other attention is as the two fields above have it.
        attention_in_f16: heads are f16 for that purpose, also where the graph computes in f32: keys and values are stored in f16.
        fused_softmax: scaling, mask and softmax of those products are one operator of the engine.
        debox_upsampling: nearest upsampling by whole factors is `debox`.
        resize_operator: images are resampled by `tract_core_resize` where it has PyTorch's meaning; otherwise by repeating
            and gathering.
        square_products: a product may have one symbol for both of its free sizes, see `square_products.py`.
    """

    streamed: str = ""
    attention_operator: bool = True
    attention_products: bool = False
    attention_padding: bool = False
    attention_in_f16: bool = False
    fused_softmax: bool = True
    debox_upsampling: bool = False
    resize_operator: bool = True
    square_products: bool = True


__all__ = ["Numerics", "Spelling"]
