"""Raw rows -> examples.

list_inputs (paths to inputs) -> count_input, cut_input, recut_input (inputs to pieces) -> read_piece (a piece to
raw rows) -> recognise (what the rows are) -> passes, copies (which rows, how often) -> read_example (a row to an
example, or to a reject with its reason). draft_job writes a first job file from the data.
"""

from packsvc.sources.choosing import copies, passes
from packsvc.sources.counting import InputCount, Mark, content_hash, count_input
from packsvc.sources.cutting import cut_input
from packsvc.sources.drafting import SourceDraft, draft_job, has_reasoning, look_at, write_job
from packsvc.sources.examples import read_example, record_text
from packsvc.sources.listing import list_inputs
from packsvc.sources.reading import read_piece, sample_files, sample_rows
from packsvc.sources.recognition import Reading, recognise
from packsvc.sources.recutting import recut_input

__all__ = [
    "InputCount",
    "Mark",
    "Reading",
    "SourceDraft",
    "content_hash",
    "copies",
    "count_input",
    "cut_input",
    "draft_job",
    "has_reasoning",
    "list_inputs",
    "look_at",
    "passes",
    "read_example",
    "read_piece",
    "recognise",
    "record_text",
    "recut_input",
    "sample_files",
    "sample_rows",
    "write_job",
]
