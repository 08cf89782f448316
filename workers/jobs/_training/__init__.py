"""What all kinds with training steps share: they build the model and its step, measure it, and derive metrics."""
