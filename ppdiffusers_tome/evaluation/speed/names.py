"""What the fields of a result may hold, for those who write it and for those who read it."""

KIND, FORMAT = "speed", 1
MEASURED, OUT_OF_MEMORY, ERROR, NOT_MEASURED = "measured", "out of memory", "error", "not measured"
PLAIN, MEMORY_EFFICIENT, TOME, BOTH = "plain", "memory-efficient", "tome", "both"
BUILT_IN, LIMIT = "built-in", "limit"
EAGER, PREDICTOR, PYTORCH = "eager", "predictor", "PyTorch"
