"""The process group over mpi4py. `import ddpbench.mpi` registers it for any script."""
