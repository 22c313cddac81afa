"""The batches of a program: leased from the ledger of the job, loaded and handed out."""
