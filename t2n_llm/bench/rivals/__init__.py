"""Other programs that run the same model, measured beside its archives: llama.cpp, ONNX Runtime, PyTorch.

In: what an archive was made from. Out: contenders, each in a child process of its own, that take token ids and tell seconds.
One file a rival; `protocol` says what each must do, `contest` lets them take turns.
"""
