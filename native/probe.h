// What fixes a worker's numbers, said (recipe) and shown (fingerprint).
#pragma once

#include <set>
#include <string>

#include "stage.h"

namespace meshnode {

// How a model was loaded.
struct Numbers {
    Numerics    numerics = Numerics::invariant;
    std::string kv;               // the type of its elements
    bool        repack          = false;
    bool        flash_attention = false;
    std::string rope;             // which rotary factors of several the context chose; empty when there is no choice
    std::string backend         = "cpu";  // else the name of what the GPU is driven by
};

// Canonical JSON: engine, patches, build options and compiler, CPU features of the build, kernels, KV type, rotary factors.
std::string recipe(const Numbers & numbers);

// A fixed small computation whose bits tell builds and machines apart that round differently: hex SHA-256 over the
// results of the operations that transformers are made of, on fixed pseudo-random inputs.
// types: the ggml types of the artifact's weights. Depends on the build, the CPU and ggml_cpu_set_batch_invariant().
std::string fingerprint(const std::set<int> & types, const Numbers & numbers);

}  // namespace meshnode
