"""Says what MPS is known to get wrong in an operation on a Mac's GPU, and what to write instead. Asked by the guard.

Read in pytorch's threads, each open for torch 2.13; none was seen on a Mac here. What the models of this package meet,
they go around by themselves (models/attention.py, models/recurrent.py, device/placement.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from runner.device.backends import HALVES

#: products of a layer, and which argument is its input
PRODUCTS = {"linear": 0, "addmm": 1, "mm": 0}
#: rows of a layer's input, of all positions together: over it gradients are wrong once another size ran before
MOST_ROWS = 2**15
#: rows of a batch from which a convolution's weights get wrong gradients
TOO_MANY_IMAGES = 2**16
#: where several are added in one place: there in no fixed order, without the error that torch promises
UNORDERED = {"index_add", "index_add_", "scatter_add", "scatter_add_", "embedding_dense_backward"}
#: what torch's attention is there, where nothing goes back through it, as in an evaluation
ATTENTION = "_scaled_dot_product_attention_math_for_mps"
SMALLER = "a smaller train.batch_size, and train.accumulate_steps to make up for it"


def known_fault(name: str, args: Sequence[Any], *, trains: bool, is_deterministic: bool) -> tuple[str, str, str] | None:
    """The kind of finding, what is so, and what to write; None for what is well.

    name: of an aten operation, addmm. trains: whether there is a way back through it.
    """
    if trains and name in PRODUCTS:
        rows = math.prod(args[PRODUCTS[name]].shape[:-1])
        if rows > MOST_ROWS:
            what = f"{name} of {rows:,} rows: over {MOST_ROWS:,} MPS may give wrong gradients (pytorch#177116)"
            return "wrong values", what, SMALLER
    if trains and name == "convolution" and len(args[0]) >= TOO_MANY_IMAGES:
        what = f"a convolution of {len(args[0]):,} rows: MPS gives wrong gradients from {TOO_MANY_IMAGES:,} on (pytorch#96225)"
        return "wrong values", what, SMALLER
    if name == "_lstm_mps" and args[4] > 1 and args[5] > 0 and args[6]:
        what = "an LSTM with dropout between its layers: MPS forgets it on the way back, and all gradients are wrong (pytorch#190056)"
        return "wrong values", what, "its layers one by one with nn.Dropout between them, dropout=0, or device=cpu"
    if name == ATTENTION and args[5] and args[0].dtype in HALVES.values():
        what = "attention with is_causal in 16 bits: MPS lets three of four rows see later positions (pytorch#195910)"
        return "wrong values", what, "attn_mask, a lower triangle, in the place of is_causal; or train.precision=fp32"
    if is_deterministic and name in UNORDERED:
        what = f"{name} adds in no fixed order on MPS, where train.deterministic=true has no hold on it"
        return "no fixed order", what, "train.deterministic=false, or device=cpu"
    return None
