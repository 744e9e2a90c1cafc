"""`serve` over an engine that draws blank images in no time: the subject of fuzz_http.py is HTTP, not drawing."""

from PIL import Image

from ppdiffusers_tome.serving.app import create_app
from ppdiffusers_tome.serving.jobs import Limits
from ppdiffusers_tome.serving.metrics import Metrics
from ppdiffusers_tome.serving.queue import PictureQueue
from ppdiffusers_tome.serving.server import serve
from ppdiffusers_tome.serving.settings import Settings, key_from_environment


class BlankEngine:
    name, sampler = "blank", "DDIM"

    def batch_key(self, job):
        return None

    def generate(self, jobs, should_stop=None):
        return [Image.new("RGB", (job.width, job.height)) for job in jobs]


if __name__ == "__main__":
    limits = Limits(sizes=((64, 64),), ratios=(0.5, 0.0), image_to_image=True, images=2, steps=2)
    metrics = Metrics()
    queue = PictureQueue(BlankEngine, "blank", limits, capacity=1000, metrics=metrics)
    serve(queue, create_app(queue, Settings(api_key=key_from_environment(), steps=1), metrics), port=0)
