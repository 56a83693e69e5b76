"""Reports of finished runs and sweeps: summaries, tables, pages."""
