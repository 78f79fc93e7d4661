"""Stream: shards -> varlen batches of one rank, exact and resumable.

`opening` reads manifests, `order` and `mixing` say which pack stands where, `epoch` cuts that into steps, `source`
reads packs (through `cache` where they are remote; checked by `geometry`, which gives `rows`), `collate` flattens them
into a `PackedBatch` (`batch`), `maker` does so for one rank and some steps (dealt out by `balance` if asked),
`prefetch` and `device` bring batches early to where they are needed, `state` says where one stands, `workers` keeps
DataLoader workers in step. `packstream` is the door.
"""

from packsvc.stream.batch import PackedBatch
from packsvc.stream.packstream import PackStream

__all__ = ["PackStream", "PackedBatch"]
