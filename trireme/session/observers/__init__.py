"""What watches a session: progress, records, summaries, profiles."""
