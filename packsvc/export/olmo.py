"""OLMo-core's SFT arrays: raw token ids, a raw bool mask of the same length, and where documents begin.

`token_ids_part_0000.npy` and `labels_mask_part_0000.npy` are memory maps without a header, as OLMo-core and
open-instruct write and read them; the mask is aligned with the ids, and the trainer shifts both. One document is one
segment. Boundaries stand in `token_ids_part_0000.csv.gz` (start, end, id, source, row): OLMo-core reads those instead
of guessing boundaries from EOS tokens, which cut chats apart where EOS ends every turn, when it is told to:

    NumpyPackedFSLDatasetConfig(
        paths=["DEST/token_ids_part_*.npy"], label_mask_paths=["DEST/labels_mask_part_*.npy"], expand_glob=True,
        sequence_length=SEQ_LEN, generate_doc_lengths=True, use_array_if_local=False, tokenizer=..., dtype=...)

It packs the documents anew, best-fit decreasing, file by file, into sequences whose length is a power of two.
"""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from packsvc.export.layout import Source
from packsvc.export.segments import Segments


class Olmo:
    """See the module."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._dtype = token_dtype(source.manifest.tokenizer.vocab_size)

    def write(self, chunks: Iterable[Segments], *, number: int, folder: Path) -> Iterator[Path]:
        part = f"part_{number:04d}"
        ids, mask = folder / f"token_ids_{part}.npy", folder / f"labels_mask_{part}.npy"
        spans = folder / f"token_ids_{part}.csv.gz"
        written = 0
        # mtime and name would make the same documents give other bytes.
        with (
            open(ids, "wb") as to_ids,
            open(mask, "wb") as to_mask,
            open(spans, "wb") as raw,
            gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as zipped,
            io.TextIOWrapper(zipped, encoding="utf-8", newline="") as text,
        ):
            lines = csv.writer(text, lineterminator="\n")
            for segments in chunks:
                to_ids.write(segments.ids.astype(self._dtype).tobytes())
                to_mask.write(segments.mask.tobytes())
                lines.writerows(self._spans(segments, written))
                written += len(segments.ids)
        yield from (ids, mask, spans)

    def extra_files(self) -> dict[str, bytes]:
        return {}

    def notes(self) -> list[str]:
        length = 1 << (self._source.manifest.seq_len - 1).bit_length()
        return [
            f"NumpyPackedFSLDatasetConfig: sequence_length={length} (a power of two), "
            f"dtype={self._dtype.name}, label_mask_paths, generate_doc_lengths=True, use_array_if_local=False "
            "(boundaries from the .csv.gz files; without it OLMo-core guesses them from EOS tokens)"
        ]

    def _spans(self, segments: Segments, written: int) -> Iterator[tuple[Any, ...]]:
        inputs, packs = self._source.manifest.inputs, segments.packs
        starts = (segments.offsets + written).tolist()
        origin = zip(packs.segment_file.tolist(), packs.segment_row.tolist(), packs.segment_part.tolist(), strict=True)
        for start, stop, (file, row, part) in zip(starts, starts[1:], origin, strict=False):
            name = inputs[file].path if file < len(inputs) else str(file)
            yield start, stop, f"{file}-{row}-{part}", name, row


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest unsigned type that holds every id, as OLMo-core chooses it.

    >>> token_dtype(151_669).name, token_dtype(50_000).name
    ('uint32', 'uint16')
    """
    for dtype in (np.uint8, np.uint16, np.uint32):
        if vocab_size - 1 <= np.iinfo(dtype).max:
            return np.dtype(dtype)
    return np.dtype(np.uint64)
