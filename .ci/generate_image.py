"""Generate an image with the installed package, outside the checkout: python generate_image.py MODEL OUTPUT.png"""

import sys
from pathlib import Path

import ppdiffusers_tome  # isort: skip
from ppdiffusers import StableDiffusionPipeline

folder = Path(ppdiffusers_tome.__file__).parent
assert "site-packages" in folder.parts, f"{folder} is not an installed package"
pipe = StableDiffusionPipeline.from_pretrained(sys.argv[1], paddle_dtype="float32").apply_tome(ratio=0.5)
image = pipe("a 3d render of fox", height=128, width=128, num_inference_steps=2, guidance_scale=2.0).images[0]
assert len(set(image.convert("L").getdata())) > 16, "the image is empty"
image.save(sys.argv[2])
print(f"ppdiffusers_tome {ppdiffusers_tome.__version__} in {folder}: {sys.argv[2]}\n{pipe.tome_summary(128, 128)}")
