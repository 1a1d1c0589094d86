"""Does the engine say what PyTorch says? The reference and where its weights stay, engines asked in turns, what agreement is."""
