"""Quantize a merged model to int8 with optimum-intel, and generate an image: without Paddle and ppdiffusers_tome.

python -m ppdiffusers_tome export --model examples/scenes_sd --layout diffusers --format openvino \
    --output build/scenes_genai
pip install optimum-intel[openvino] nncf                               # on the machine without Paddle
python examples/with_int8.py build/scenes_genai hybrid "a 3d render of fox on red bricks" fox.png

ONNX Runtime's own quantizer (quantize_dynamic) refuses a folder of --for onnxruntime, whose attention is fused
("Unable to find data type"): quantize one without that option, or pass extra_options={"DefaultTensorType": 1}.
"""

import sys
import nncf
import optimum.intel as intel

folder, mode, prompt, output = sys.argv[1:]
config = {  # what is int8: weights alone; convolutions too; convolutions and linear layers
    "weights": intel.OVWeightQuantizationConfig(bits=8),
    "hybrid": intel.OVWeightQuantizationConfig(bits=8, quant_method="hybrid"),
    "full": intel.OVQuantizationConfig(),
}[mode]
pipe, data = intel.OVDiffusionPipeline.from_pretrained(folder, dynamic_shapes=False), None
if mode != "weights":
    pipe.unet.request = intel.openvino.quantization.InferRequestWrapper(pipe.unet.request, inputs := [])
    # For the range of activations. optimum-intel collects at 512 px or less, which fails at another exported size.
    pipe(["a 3d render of owl on grass", prompt], num_inference_steps=10)
    data, config.num_samples = {"unet": nncf.Dataset(inputs)}, len(inputs)
    products = [op for op in pipe.unet.model.get_ops() if op.get_type_name() == "MatMul"]
    # The product that compares tokens, as the method "tomesd" does: in int8 other tokens would merge. "interlace" and
    # "todo" compare none.
    similarity = [op for op in products if op.input_value(1).get_node().get_type_name() != "Constant"]
    config.ignored_scope = {"names": [op.get_friendly_name() for op in similarity]}
parts = intel.OVPipelineQuantizationConfig({"unet": config}, intel.OVWeightQuantizationConfig(bits=8))
intel.OVQuantizer(pipe).quantize(data, ov_config=intel.OVConfig(quantization_config=parts))
pipe.save_pretrained(f"{folder}_{mode}")  # optimum-intel loads it as it loads the folder that was exported
pipe(prompt, num_inference_steps=20, guidance_scale=3.0).images[0].save(output)  # Stable Diffusion: 7.5
print(f"wrote {output} and {folder}_{mode}")
