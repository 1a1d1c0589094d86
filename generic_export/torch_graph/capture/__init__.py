"""An `nn.Module` and example arguments in, a captured graph out."""
