"""Tables in a job: rows that layers and programs ask for, requests for them, shards of them."""
