"""Text to video with merged tokens in each frame; writes video.gif. The bundled model is random: it shows noise."""

from pathlib import Path

import ppdiffusers_tome  # adds pipe.apply_tome; before Paddle
import numpy as np
import paddle
from ppdiffusers import TextToVideoSDPipeline
from ppdiffusers.utils import export_to_gif

# Of the hub, after ppdiffusers_tome.prepare_download(MODEL): "damo-vilab/text-to-video-ms-1.7b". Whether merging makes
# it faster was not measured.
MODEL = str(Path(__file__).parent / "tiny" / "video")

pipe = TextToVideoSDPipeline.from_pretrained(MODEL, paddle_dtype=paddle.float32)  # float16 on a GPU
pipe.apply_tome()  # attention over the pixels of a frame merges, attention over the frames does not
paddle.seed(0)
frames = pipe("an owl flies over a lake", num_frames=4, num_inference_steps=4, output_type="np").frames
export_to_gif([np.uint8(255 * frame) for frame in frames], "video.gif")
print("wrote video.gif")
