"""Jobs whose tasks are started by agents: processes on the nodes of a cluster."""
