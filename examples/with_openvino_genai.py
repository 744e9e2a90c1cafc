"""Generate an image with a merged model in OpenVINO GenAI: without Paddle and without ppdiffusers_tome.

python -m ppdiffusers_tome export --model examples/scenes_sd --size 256 --ratio 0.75 --layout diffusers \
    --format openvino --output build/scenes_genai
pip install openvino-genai pillow "openvino-tokenizers[transformers]"  # on the machine without Paddle
convert_tokenizer build/scenes_genai/tokenizer --output build/scenes_genai/tokenizer
python examples/with_openvino_genai.py build/scenes_genai "a 3d render of fox on red bricks" fox.png
"""

import json
import sys
from pathlib import Path

import openvino_genai
from PIL import Image

if len(sys.argv) != 4:
    sys.exit("usage: with_openvino_genai.py FOLDER PROMPT OUTPUT.png")
folder, prompt, output = sys.argv[1:]
size = json.loads((Path(folder) / "model_index.json").read_text())["_ppdiffusers_tome"]["size"]  # the only one
width, height = map(int, size.split("x"))
pipe = openvino_genai.Text2ImagePipeline(folder, "CPU")
# Steps and guidance of scenes_sd. Stable Diffusion: guidance_scale=7.5
image = pipe.generate(prompt, height=height, width=width, num_inference_steps=20, guidance_scale=3.0).data[0]
Image.fromarray(image).save(output)
print(f"wrote {output}")
