"""Generate an image with a merged model in optimum-intel: without Paddle and without ppdiffusers_tome.

python -m ppdiffusers_tome export --model examples/scenes_sd --size 256 --ratio 0.75 --layout diffusers \
    --output build/scenes_openvino
pip install optimum-intel[openvino]                                    # on the machine without Paddle
python examples/with_optimum_intel.py build/scenes_openvino "a 3d render of fox on red bricks" fox.png
"""

import sys
from pathlib import Path

from optimum.intel import OVDiffusionPipeline

if len(sys.argv) != 4:
    sys.exit("usage: with_optimum_intel.py FOLDER PROMPT OUTPUT.png")
folder, prompt, output = sys.argv[1:]
from_onnx = (Path(folder) / "unet" / "model.onnx").exists()  # or --format openvino
pipe = OVDiffusionPipeline.from_pretrained(folder, from_onnx=from_onnx, dynamic_shapes=False)
# Steps and guidance of scenes_sd. Stable Diffusion: guidance_scale=7.5
pipe(prompt, num_inference_steps=20, guidance_scale=3.0).images[0].save(output)
print(f"wrote {output}")
