"""How ranks are started, found and ended: by ddpbench, torchrun, mpirun or Slurm."""
