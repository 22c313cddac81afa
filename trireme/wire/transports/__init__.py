"""The transport tcp; others are plug-ins."""
