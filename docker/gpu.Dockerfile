# The server on an NVIDIA GPU (compute capability 6.1 to 8.6, as the wheels of paddlepaddle-gpu 2.6.2), in Paddle Inference: the model must have been
# exported with Paddle 2.6.2 and --format paddle or both. Neither built nor run yet. In the repository's root:
#   docker build -f docker/gpu.Dockerfile -t ppdiffusers_tome:gpu .
#   docker run --rm --gpus all -p 127.0.0.1:8000:8000 -e PPDIFFUSERS_TOME_API_KEY -v "$PWD/build/emoji:/model:ro" ppdiffusers_tome:gpu
# Another --user needs a home that it can write, in which PaddleNLP makes folders: -e HOME=/tmp
FROM nvidia/cuda:11.8.0-cudnn8-runtime-ubuntu22.04

# Ubuntu 22.04 has Python 3.10; Paddle needs the GNU OpenMP library
RUN apt-get update && apt-get install --yes --no-install-recommends libgomp1 python3 python3-pip python-is-python3 && rm -rf /var/lib/apt/lists/*

WORKDIR /app
COPY requirements/ requirements/
COPY ppdiffusers_tome/requirements/serve.txt ./
RUN pip install --no-cache-dir --no-deps -r requirements/build.txt \
 && pip install --no-cache-dir --no-deps --no-build-isolation -r requirements/gpu.txt -r serve.txt
COPY setup.py pyproject.toml README.md LICENSE NOTICE ./
COPY ppdiffusers_tome/ ppdiffusers_tome/
RUN pip install --no-cache-dir --no-deps --no-build-isolation . \
 && useradd --create-home server
USER server
WORKDIR /home/server
EXPOSE 8000
HEALTHCHECK --start-period=5m CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health')"]
# exec form, so that SIGTERM reaches the server, which then finishes accepted requests
ENTRYPOINT ["python", "-m", "ppdiffusers_tome", "serve", "--host", "0.0.0.0", "--port", "8000"]
CMD ["--model", "/model", "--device", "gpu"]
