#!/bin/sh
# check_environment.sh VENV LOCK STACK: fails, with the remedy, if make must not install LOCK into the folder VENV.
# make may change what it made itself, and an environment with this stack's Paddle, as README.md installs it. In
# another one, such as README.md's for GPUs, it would put a second Paddle over the first.
set -eu
venv=$1 lock=$2 stack=$3
if [ -e "$venv/.made-by-make" ] || [ -e "$venv/.installed" ] || [ -z "$(ls -A "$venv" 2>/dev/null)" ]; then
  exit 0
fi
paddle=$(sed -n 's/^\(paddlepaddle[a-z-]*\)==\([0-9.]*\).*/\1 \2/p' "$lock")
there=$(ls "$venv"/lib/python3*/site-packages 2>/dev/null | sed -n 's/^\(paddlepaddle[a-z_]*\)-\(.*\)\.dist-info$/\1 \2/p' | tr _ -)
if [ "$there" = "$paddle" ]; then
  exit 0
fi
cat >&2 <<END
make did not make $venv/, which has ${there:-no Paddle}; STACK=$stack would install $paddle into it. Do one of these:
  use it without make:       $venv/bin/python -m ppdiffusers_tome compare --model examples/scenes_sd
  let make make another one: add VENV=.venv-make to the command
  make it again:             rm -r $venv, then the same command
END
exit 1
