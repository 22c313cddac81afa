"""What torchrun, mpirun, Slurm, `TF_CONFIG` and the classic flags say of a process. Pure."""
