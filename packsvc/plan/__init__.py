"""Plan: lengths -> which segments share a pack; numpy only, tokens never seen.

`decreasing` is exact first-fit decreasing on the histogram of lengths, `in_order` the packers that take segments
as they come, `strategies` chooses, shuffles and gives the final order, `shuffles` makes the permutations,
`bounds` tells how good a packing could be at best.
"""

from packsvc.plan.bounds import lower_bound
from packsvc.plan.decreasing import ffd
from packsvc.plan.shuffles import permutation
from packsvc.plan.strategies import STRATEGIES, place

__all__ = ["STRATEGIES", "ffd", "lower_bound", "permutation", "place"]
