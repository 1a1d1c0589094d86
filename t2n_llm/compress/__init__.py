"""A recipe applied to one model: options, plan, calibration walks, statistics, the form in which tensors are stored."""
