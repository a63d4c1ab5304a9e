#!/bin/sh
# Deletes from a folder of installed packages what a server on a CPU never loads: slim.sh SITE_PACKAGES
# Engines keep the CPU plug-in and the ONNX frontend. What trains and compresses needs torch, and is there uncompiled.
# huggingface_hub, which tokenizers bring and a server never imports, stays where the extra `remote` is installed.
set -eu
cd "$1"
rm -rf openvino/include openvino/cmake openvino/tools openvino/torch \
    openvino/frontend/pytorch openvino/frontend/tensorflow openvino/frontend/jax \
    openvino/libs/libopenvino_intel_gpu_plugin* openvino/libs/libopenvino_intel_npu_plugin* openvino/libs/cache.json \
    openvino/libs/*tensorflow* openvino/libs/*pytorch* openvino/libs/*paddle* openvino/libs/*gguf* openvino/libs/*jax* \
    openvino/libs/*_auto_* openvino/libs/*hetero* openvino/libs/libopenvino_c.so* openvino/libs/*template* \
    onnxruntime/transformers onnxruntime/tools onnxruntime/quantization onnxruntime/datasets onnxruntime/capi/libonnxruntime.so* \
    numpy/f2py numpy/distutils
[ -d aiohttp ] || rm -rf hf_xet hf_xet.libs hf_xet-* huggingface_hub huggingface_hub-* fsspec fsspec-* httpx2 httpx2-* httpcore2 httpcore2-* \
    tqdm tqdm-*
find pygments/lexers \( -name '*.py' -o -name '*.pyc' \) ! -name '__init__.*' ! -name '_mapping.*' -delete
find . -type d \( -name tests -o -name test \) -prune -exec rm -rf {} +
find . \( -name '*.pyi' -o -name '*.pyx' -o -name '*.pxd' -o -name '*.h' -o -name '*.a' \) -delete
find . \( -path './train/*.pyc' -o -path './compress/*.pyc' \) -delete
