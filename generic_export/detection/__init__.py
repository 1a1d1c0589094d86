"""Object detection with a fixed number of results: what a detector of torchvision answers, in a graph of known sizes."""
