"""Speech of text: a graph of the text, what makes frames of its rows, and a graph of the waveform, with noise as inputs."""
