"""Text to video with token merging, frame by frame. The model here is tiny and random, so its frames are noise."""

import ppdiffusers_tome  # adds apply_tome to pipelines
import paddle
from ppdiffusers import TextToVideoSDPipeline
from ppdiffusers.utils import export_to_video
from tiny import write_tiny

MODEL = write_tiny("video")  # or "damo-vilab/text-to-video-ms-1.7b"

pipe = TextToVideoSDPipeline.from_pretrained(str(MODEL))
pipe.apply_tome(ratio=0.5)
paddle.seed(0)
frames = pipe("an owl flies over a lake", num_frames=4, num_inference_steps=4).frames
export_to_video(frames, "video.mp4")
