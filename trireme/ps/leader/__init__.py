"""The leader: the object at shard 0 whose one sequence of decisions every shard follows."""
