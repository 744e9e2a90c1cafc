#!/usr/bin/env bash
# Install the package as a user does: pip, an empty environment, the extra "cpu" alone and the tested versions as constraints.
# Then run its commands outside the checkout, from their help to images of the bundled model. PYTHON=... names the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
checkout=$PWD
export PIP_DISABLE_PIP_VERSION_CHECK=1
rm -rf build/lib build/install  # setuptools would put files of an earlier build into the wheel
"${PYTHON:-python3}" -m venv --clear build/install-venv
build/install-venv/bin/python -m pip install --quiet -c constraints.txt ".[cpu]"
build/install-venv/bin/python -m pip check

mkdir -p build/install
cd build/install
tome() {
  echo "+ $*"
  env -u PYTHONPATH ../install-venv/bin/python -I -W ignore -m ppdiffusers_tome "$@"
}
tome --help >/dev/null
for command in export serve compare generate; do
  tome "$command" --help >/dev/null
done
model=$checkout/examples/emoji_sd
tome compare --model "$model" --size 64 --steps 2 --output compared
tome export --model "$model" --size 64 --ratio 0.5 --output exported
echo "a 3d render of fox" > prompts.txt
tome generate --model exported --prompts prompts.txt --steps 2 --output images
ls compared/compare_64.jpg images/*.png
if installed=$(../install-venv/bin/python -m pip list 2>/dev/null | grep -i "^scikit.image "); then
  echo "$installed is installed, so this environment shows nothing: no extra may bring it" >&2
  exit 1
fi
