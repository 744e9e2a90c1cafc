"""Generate an image with a merged model in Optimum: without Paddle and without ppdiffusers_tome.

The folder is an export, or what `merge-onnx` has made of a model in Optimum's layout.

python -m ppdiffusers_tome export --model examples/scenes_sd --size 256 --ratio 0.75 --layout diffusers \
    --for onnxruntime --output build/scenes_onnx
pip install optimum-onnx onnxruntime                                   # on the machine without Paddle
python examples/with_optimum.py build/scenes_onnx "a 3d render of fox on red bricks" fox.png
"""

import json
import sys
from pathlib import Path

from optimum.onnxruntime import ORTDiffusionPipeline

if len(sys.argv) != 4:
    sys.exit("usage: with_optimum.py FOLDER PROMPT OUTPUT.png")
folder, prompt, output = sys.argv[1:]
pipe = ORTDiffusionPipeline.from_pretrained(folder)
about = json.loads((Path(folder) / "model_index.json").read_text()).get("_ppdiffusers_tome")
width, height = map(int, about["size"].split("x")) if about else (None, None)  # an export has one; others any
# Steps and guidance of scenes_sd. Stable Diffusion: guidance_scale=7.5
pipe(prompt, height=height, width=width, num_inference_steps=20, guidance_scale=3.0).images[0].save(output)
print(f"wrote {output}")
