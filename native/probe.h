// What fixes a worker's numbers, said (recipe) and shown (fingerprint).
#pragma once

#include <set>
#include <string>

#include "stage.h"

namespace meshnode {

// Canonical JSON: engine and patches, CPU features of the build, kernels, KV type.
// rope: which rotary factors of several the engine chose for the context that was asked for; empty when there is no choice.
std::string recipe(Numerics numerics, const std::string & kv, bool repack, bool flash_attention, const std::string & rope);

// A fixed small computation whose bits tell builds and machines apart that round differently: hex SHA-256 over the
// results of the operations that transformers are made of, on fixed pseudo-random inputs.
// types: the ggml types of the artifact's weights. Depends on the build, the CPU and ggml_cpu_set_batch_invariant().
std::string fingerprint(const std::set<int> & types, bool flash_attention);

}  // namespace meshnode
