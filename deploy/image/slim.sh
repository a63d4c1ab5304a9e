#!/bin/sh
# Deletes from a folder of installed packages what a server on a CPU never loads: slim.sh SITE_PACKAGES
# Engines keep the CPU plug-in and the ONNX frontend. What addresses need (hf_xet) stays where the extra `remote` is installed.
set -eu
cd "$1"
rm -rf openvino/include openvino/cmake openvino/tools openvino/torch \
    openvino/frontend/pytorch openvino/frontend/tensorflow openvino/frontend/jax \
    openvino/libs/libopenvino_intel_gpu_plugin* openvino/libs/libopenvino_intel_npu_plugin* openvino/libs/cache.json \
    openvino/libs/*tensorflow* openvino/libs/*pytorch* openvino/libs/*paddle* openvino/libs/*gguf* openvino/libs/*jax* \
    openvino/libs/*auto_batch* openvino/libs/*hetero* openvino/libs/*template* \
    onnxruntime/transformers onnxruntime/tools onnxruntime/quantization onnxruntime/datasets onnxruntime/capi/libonnxruntime.so* \
    numpy/f2py numpy/distutils
[ -d aiohttp ] || rm -rf hf_xet hf_xet.libs hf_xet-*
find . -type d \( -name tests -o -name test \) -prune -exec rm -rf {} +
find . -name '*.pyi' -delete
