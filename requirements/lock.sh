#!/usr/bin/env bash
# Rewrite every generated requirements file from the *.in files beside it ("make lock"). Needs PyPI and a Python with venv;
# uv, which resolves for Python 3.10 to 3.12 at once, is installed into a throwaway environment. Run the tests on every stack after.
#
# The stacks are resolved as PyPI stood on STACK_DATE: ppdiffusers 0.29.0 declares hardly any upper bounds, and what came out
# later breaks it. Paddle 3, the safetensors it asks for and ONNX Runtime are younger, so they, and the test tools, are cut at
# TOOLS_DATE; h11, and httpcore, which bounds it, too: before 0.16 h11 accepted malformed chunked bodies (CVE-2025-43859).
set -euo pipefail
cd "$(dirname "$0")"

PADDLE2=2.6.2 PADDLE3=3.3.1
CONVERTER3=2.1.0  # paddle2onnx that reads Paddle 3's programs; ppdiffusers asks for any, and 1.2 reads those of Paddle 2.6
STACK_DATE=2024-11-15 TOOLS_DATE=2026-11-01
UV=0.13.9

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet "uv==$UV"

cat > "$work/pyproject.toml" <<'TOML'
[project]
name = "lock"
version = "0"
requires-python = ">=3.10,<3.13"
[tool.uv]
environments = ["sys_platform == 'linux' and platform_machine == 'x86_64' and python_full_version < '3.13'"]
TOML

# resolve NAME [uv options]: $work/NAME.in -> $work/NAME.all, one "name==version" a line, and NAME.lock, without what no import needs.
# - the platform is always CPython on Linux on x86_64: only Python markers stay
# - ligo-segments is declared by ppdiffusers but never imported, and is a C extension without wheels: left out, no compiler needed
# - openvino-telemetry, which reports imports of OpenVINO to its makers: OpenVINO imports without it
# - opencv-python needs libGL from the system, opencv-python-headless is the same module without it
resolve() {
  local name=$1
  shift
  (cd "$work" && venv/bin/uv pip compile "$name.in" --quiet --universal --python-version 3.10 --no-annotate --no-header "$@") |
    sed -E -e "s/ and (platform_machine|sys_platform|platform_python_implementation|implementation_name) [=!]= '[A-Za-z0-9_]+'//g" \
      -e "s/ (;|and) python_full_version < '3.13'$//" \
      -e "/implementation_name == 'pypy'/d" > "$work/$name.all"
  sed -e '/^ligo-segments==/d' -e '/^openvino-telemetry==/d' -e 's/^opencv-python==/opencv-python-headless==/' "$work/$name.all" | LC_ALL=C sort > "$work/$name.lock"
}

# emit FILE, with the lines of standard input below the file's own leading comment (kept as it is: edit it in the file).
emit() {
  { sed -n '/^#/!q;p' "$1"; cat; } > "$work/emit"
  cat "$work/emit" > "$1"
}

{ cat stack.in; echo "paddlepaddle==$PADDLE2"; } > "$work/paddle2.in"
{ cat stack.in; echo "paddlepaddle==$PADDLE3"; echo "paddle2onnx==$CONVERTER3"; } > "$work/paddle3.in"
{ cat stack.in; echo "paddlepaddle-gpu==$PADDLE2"; } > "$work/gpu.in"
H11=(--exclude-newer-package "h11=$TOOLS_DATE" --exclude-newer-package "httpcore=$TOOLS_DATE")
resolve paddle2 --exclude-newer "$STACK_DATE" "${H11[@]}"
resolve gpu --exclude-newer "$STACK_DATE" "${H11[@]}"
resolve paddle3 --exclude-newer "$STACK_DATE" "${H11[@]}" --exclude-newer-package "paddlepaddle=$TOOLS_DATE" \
  --exclude-newer-package "safetensors=$TOOLS_DATE" --exclude-newer-package "paddle2onnx=$TOOLS_DATE" \
  --exclude-newer-package "polygraphy=$TOOLS_DATE" --exclude-newer-package "onnxoptimizer=$TOOLS_DATE"

# What all three share is written once; each stack's own file holds the rest.
LC_ALL=C comm -12 "$work/paddle2.lock" "$work/paddle3.lock" | LC_ALL=C comm -12 - "$work/gpu.lock" > "$work/shared"
cp "$work/shared" "$work/constraints"
cp runtime.in serve.in bench.in onnx.in test.in ray.in "$work"
resolve runtime --exclude-newer "$TOOLS_DATE" --constraints "$work/constraints"
LC_ALL=C sort -u "$work/shared" "$work/runtime.lock" > "$work/common"
grep -E '^(pip|setuptools|wheel)==' "$work/common" | emit build.txt
{ echo "-r build.txt"; grep -vE '^(pip|setuptools|wheel)==' "$work/common"; } | emit common.txt
own() { echo "-r $2"; LC_ALL=C comm -13 "$work/shared" "$work/$1.lock"; }
own paddle3 requirements/common.txt | emit ../requirements.txt
own paddle2 common.txt | emit paddle2.txt
own gpu common.txt | emit gpu.txt

# These files go with any stack, also one without what runtime.in adds.
resolve serve --exclude-newer "$TOOLS_DATE" --constraints "$work/constraints"
LC_ALL=C comm -13 "$work/shared" "$work/serve.lock" | emit ../ppdiffusers_tome/requirements/serve.txt
resolve bench --exclude-newer "$TOOLS_DATE" --constraints "$work/constraints"
LC_ALL=C comm -13 "$work/shared" "$work/bench.lock" | emit bench.txt
resolve onnx --exclude-newer "$TOOLS_DATE" --constraints "$work/constraints"
LC_ALL=C comm -13 "$work/shared" "$work/onnx.lock" | emit ../ppdiffusers_tome/requirements/onnx.txt
resolve test --exclude-newer "$TOOLS_DATE" --constraints "$work/constraints"
LC_ALL=C comm -13 "$work/common" "$work/test.lock" | emit test.txt

# Ray has the versions of the test tools, but its file holds all that it adds to a stack and to serving, which need no test tools.
LC_ALL=C sort -u "$work/shared" "$work/test.lock" > "$work/constraints"
resolve ray --exclude-newer "$TOOLS_DATE" --constraints "$work/constraints"
LC_ALL=C sort -u "$work/shared" "$work/serve.lock" | LC_ALL=C comm -13 - "$work/ray.lock" | emit ../ppdiffusers_tome/requirements/ray.txt

# For pip, which installs all that is declared and reads "-r" in a file of constraints as requirements: one file, with what the locks leave out.
(cd "$work" && LC_ALL=C sort -u paddle3.all paddle3.lock runtime.all serve.all onnx.all ray.all) | emit ../constraints.txt

# The site is built in an environment of its own.
cp docs.in "$work"
resolve docs --exclude-newer "$TOOLS_DATE"
emit docs.txt < "$work/docs.lock"

# What is installed into an environment of its own needs no version of the stacks.
cp dist.in "$work"
resolve dist --exclude-newer "$TOOLS_DATE"
emit dist.txt < "$work/dist.lock"

# torch for CPUs, which needs nothing of CUDA.
cp optimum.in "$work"
resolve optimum --exclude-newer "$TOOLS_DATE"
sed -E -e '/^(nvidia-|cuda-|triton)/d' -e 's/^torch==[0-9.]+/&+cpu/' "$work/optimum.lock" | emit optimum.txt
