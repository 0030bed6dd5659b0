// What nearly every file on libtorch reads, compiled once for all of them (native_build.py); each names what it needs all the
// same.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>
