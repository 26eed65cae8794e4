// A fixed small computation whose bits tell builds and machines apart that round differently.
#pragma once

#include <set>
#include <string>

namespace meshnode {

// Hex SHA-256 over the results of the operations that transformers are made of, on fixed pseudo-random inputs.
// types: the ggml types of the artifact's weights. Depends on the build, the CPU and ggml_cpu_set_batch_invariant().
std::string fingerprint(const std::set<int> & types, bool flash_attention);

}  // namespace meshnode
