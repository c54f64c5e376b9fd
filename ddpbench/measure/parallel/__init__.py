"""Steps of a model whose parameters or compute are divided over a mesh."""
