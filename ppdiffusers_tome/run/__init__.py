"""Run an exported folder in Paddle Inference, ONNX Runtime or OpenVINO: load its programs and build a pipeline."""
