"""Assemble: a plan and encoded segments -> the arrays of packs, ready to be written.

`columns` gathers ids, masks, boundaries and origins; `positions` numbers tokens within their segments.
"""

from packsvc.assemble.columns import assemble
from packsvc.assemble.positions import position_ids, position_ids_from_cu_seqlens

__all__ = ["assemble", "position_ids", "position_ids_from_cu_seqlens"]
