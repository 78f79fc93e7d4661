"""Export: a packed output -> the files that another trainer reads, masks converted to its convention.

`exporting` opens the output and goes through it shard by shard; `segments` takes packs apart and checks them;
`weights` refuses what a format cannot say; one file a format says how packs look there (`trl`, `megatron`,
`torchtune`, `olmo`, `examples`, on `layout` and `tables`); `record` is what is left in the destination.
"""

from packsvc.export.exporting import FORMATS, export_dataset
from packsvc.export.record import Exported, ExportedFile, Totals

__all__ = ["FORMATS", "Exported", "ExportedFile", "Totals", "export_dataset"]
