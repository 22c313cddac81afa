"""What contenders run: some of it in the peers' environments, so it imports little."""
