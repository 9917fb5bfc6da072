// What the operator tests share: small models that keep every asymmetry (H != N*d, G < N, K < E,
// 2I != H), random tensors from a given seed, and comparisons by relative error ||a - b|| / ||b||.

#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "runtime/ops/layer.h"
#include "tests/ops/autograd.h"

namespace oom::testing {

struct NamedModel {
  std::string name;
  ModelDescription model;
};

// Qwen3 with both kinds of top-k weights, Mixtral without and with a sliding window, Gemma 4's two
// kinds of layers; each of one layer.
std::vector<NamedModel> SmallModels();

// Every field of LayerTensors with its name.
const std::vector<std::pair<std::string, at::Tensor LayerTensors::*>>& LayerFields();

at::Tensor Random(at::IntArrayRef shape, uint64_t seed, at::ScalarType type = at::kDouble);

// Random weights of a layer (norms around 1), of a deviation that makes every branch matter.
LayerTensors RandomLayer(const ModelDescription& model, const LayerDescription& description,
                         uint64_t seed, at::ScalarType type = at::kDouble);

// The model's first layer with another mixture.
LayerDescription LayerWith(const ModelDescription& model, MixtureKind kind);

// Wide zeros in the shapes of `weights`.
LayerTensors ZeroGradients(const LayerTensors& weights);

// Copies that require a gradient; undefined stays undefined.
LayerTensors Leaves(const LayerTensors& weights);

// d(sum(output * seed_gradient)) / d(leaf) of each leaf; zero where the leaf was not used.
std::vector<at::Tensor> Autograd(const at::Tensor& output, const at::Tensor& seed_gradient,
                                 const std::vector<at::Tensor>& leaves);

double RelativeError(const at::Tensor& actual, const at::Tensor& expected);

// Fails, naming `what`, unless the relative error is at most `bar`.
void ExpectNear(const at::Tensor& actual, const at::Tensor& expected, double bar,
                const std::string& what);

// Every defined field of both within `bar`.
void ExpectNear(const LayerTensors& actual, const LayerTensors& expected, double bar,
                const std::string& what);

bool BitEqual(const at::Tensor& a, const at::Tensor& b);
bool BitEqual(const LayerTensors& a, const LayerTensors& b);

}  // namespace oom::testing
