"""Testing: proof in a team's own tests, on its own model and its own collate.

Ten lines are enough (pytest and hypothesis; the model and `collate` are yours):

    from hypothesis import given
    from packsvc.testing import DAMAGES, assert_boundaries, assert_isolated, assert_mask, packed_batches

    @given(packed_batches(vocab_size=96, min_segments=2))
    def test_my_batches_stay_apart(batch):
        assert_boundaries(batch)                  # offsets, positions and segment numbers say the same
        assert_mask(batch)                        # no target at a segment's start or on padding, labels unshifted
        assert_isolated(model, batch)             # model(**batch.hf()) sees no example from another
        assert_isolated(model, collate(batch))    # nor with the keyword arguments that my trainer makes of it

`assert_mask(batch, tokenizer=tokenizer, trained=["Hello!<end>", ...])` says which text must be trained. `DAMAGES` holds
batches made wrong on purpose, each with the assertion that sees it: `DAMAGES["positions_run_on"].apply(batch)`.

`assertions` are those, `reading` finds segments in any batch, `damages` makes wrong ones, `strategies` draws right
ones; only they need hypothesis.
"""

from packsvc.testing.assertions import assert_boundaries, assert_isolated, assert_mask
from packsvc.testing.damages import DAMAGES, Damage
from packsvc.testing.strategies import packed_batches, packs, segment_lengths

__all__ = [
    "DAMAGES",
    "Damage",
    "assert_boundaries",
    "assert_isolated",
    "assert_mask",
    "packed_batches",
    "packs",
    "segment_lengths",
]
