"""What is read of finished runs and sweeps: summaries, tables, pages."""
