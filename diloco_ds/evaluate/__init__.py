"""What the global weights are worth: loss on held-out text, and benchmarks run by lm-eval."""
