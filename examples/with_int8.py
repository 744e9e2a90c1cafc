"""Quantize a merged model to int8 with optimum-intel, and generate an image: without Paddle and ppdiffusers_tome.

python -m ppdiffusers_tome export --model examples/scenes_sd --size 256 --ratio 0.5 --layout diffusers \
    --format openvino --output build/scenes_openvino
pip install optimum-intel[openvino] nncf                               # on the machine without Paddle
python examples/with_int8.py build/scenes_openvino hybrid "a photo of an owl" owl.png
"""

import sys

import nncf
from optimum.intel import OVConfig, OVDiffusionPipeline, OVQuantizationConfig, OVQuantizer, OVWeightQuantizationConfig
from optimum.intel.openvino.quantization import InferRequestWrapper

if len(sys.argv) != 5 or sys.argv[2] not in ("weights", "hybrid", "full"):
    sys.exit("usage: with_int8.py FOLDER weights|hybrid|full PROMPT OUTPUT.png")  # int8 are: the weights alone;
folder, mode, prompt, output = sys.argv[1:]  # convolutions too; convolutions and linear layers
pipe = OVDiffusionPipeline.from_pretrained(folder, dynamic_shapes=False)
inputs = []  # of the UNet, from which the range of activations is known
if mode != "weights":
    pipe.unet.request = InferRequestWrapper(pipe.unet.request, inputs)
    for words in ("a photo of a cat", "a photo of a house"):  # take prompts like yours
        pipe(words, num_inference_steps=10)
config = OVWeightQuantizationConfig(bits=8, quant_method="hybrid" if mode == "hybrid" else "default")
config = OVQuantizationConfig() if mode == "full" else config
config.num_samples = len(inputs) or None
data = {"unet": nncf.Dataset(inputs)} if inputs else None
OVQuantizer(pipe).quantize(calibration_dataset=data, ov_config=OVConfig(quantization_config=config))
pipe(prompt, num_inference_steps=20).images[0].save(output)  # pipe.save_pretrained(…) writes a folder to load again
