"""packsvc."""
