"""fxhome: a byte budget for a PyTorch training step."""
