"""Computes what the rows of a block read of each other, in a recurrent chunk whose key channels have log decays.

A product of a query and a key is weighed channel by channel with the decays between their rows. A matrix product takes
one factor for each row, so the decays are parted at a row between the two. Two neighbouring segments of 1, 2, 4, ...
rows meet there: the later row decays from there on, the earlier one up to there. Each pair of rows is in two such
segments of one length, and each length is one product on the tensor cores.

From one length to the next, a row's factor gains those of the other segment, whose log decays a product with ones adds.
So no exponent is positive, and no sum is a difference of others, which would round what is left of a channel.
"""

import triton
import triton.language as tl


@triton.jit
def products_of_channels(
    key, query, decay, SLICES: tl.constexpr, BLOCK: tl.constexpr, SLICE: tl.constexpr, DOUBLINGS: tl.constexpr
):  # fmt: skip
    # All given are [SLICES, BLOCK, SLICE]. Returns what the keys, below the diagonal, and the queries of a block read
    # of its keys, [BLOCK, BLOCK] each; the keys and the queries decayed from the block's first row through their own,
    # and the keys from behind their own row through the last.
    index = tl.arange(0, BLOCK)
    row, column = index[None, :, None], index[None, None, :]
    of_keys = tl.zeros((SLICES, BLOCK, BLOCK), tl.float32)
    of_queries = tl.where(row == column, tl.sum(query * key, 2, keep_dims=True), 0.0)
    left = key
    key *= tl.exp(decay)
    query *= tl.exp(decay)
    for doubling in tl.range(DOUBLINGS):
        second = (row >> doubling) % 2 == 1
        other = (row >> (doubling + 1) == column >> (doubling + 1)) & (row >> doubling != column >> doubling)
        pair = other & second
        turned = tl.permute(left, (0, 2, 1))
        of_keys += tl.where(pair, tl.dot(key, turned, input_precision="tf32x3"), 0.0)
        of_queries += tl.where(pair, tl.dot(query, turned, input_precision="tf32x3"), 0.0)
        others = tl.broadcast_to(tl.where(other, 1.0, 0.0), (SLICES, BLOCK, BLOCK))
        through = tl.exp(tl.dot(others, decay, input_precision="tf32x3"))
        key = tl.where(second, key * through, key)
        query = tl.where(second, query * through, query)
        left = tl.where(second, left, left * through)
    return tl.sum(of_keys, 0), tl.sum(of_queries, 0), key, query, left
