"""Who is there: the cluster's specification, its membership, and the coordinator that serves it."""
