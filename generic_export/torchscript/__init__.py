"""TorchScript artifacts: interpreted, hardened, captured; what is captured instead of a module that torch.export refuses."""
