"""Write a folder with the programs of a pipeline: trace its models, check them, convert them to ONNX."""
