"""Statistics: manifest and tables -> figures, words, and answers to SQL.

`figures` sums what the manifest knows, `wording` puts it into lines and tables, `sql` opens the tables to DuckDB.
"""

from packsvc.statistics.figures import Alignment, Stats, stats
from packsvc.statistics.sql import TABLES, query
from packsvc.statistics.wording import by_reason, by_source, by_split, describe

__all__ = ["TABLES", "Alignment", "Stats", "by_reason", "by_source", "by_split", "describe", "query", "stats"]
