# The server on a CPU, with the default stack (Paddle 3.3.1, ONNX Runtime), as an ordinary user. In the repository's root:
#   docker build -f docker/cpu.Dockerfile -t ppdiffusers_tome:cpu .
#   docker run --rm -p 127.0.0.1:8000:8000 -e PPDIFFUSERS_TOME_API_KEY -v "$PWD/build/emoji:/model:ro" ppdiffusers_tome:cpu
# Another --user needs a home that it can write, in which PaddleNLP makes folders: -e HOME=/tmp
FROM python:3.11-slim

# Paddle needs the GNU OpenMP library
RUN apt-get update && apt-get install --yes --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/*

WORKDIR /app
COPY requirements/ requirements/
COPY requirements.txt ppdiffusers_tome/requirements/serve.txt ./
RUN pip install --no-cache-dir --no-deps -r requirements/build.txt \
 && pip install --no-cache-dir --no-deps --no-build-isolation -r requirements.txt -r serve.txt
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
CMD ["--model", "/model"]
