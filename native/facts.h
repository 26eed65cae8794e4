// What has to be known of a file before the engine opens it.
#pragma once

#include <cstdint>
#include <set>
#include <string>

namespace meshnode {

struct FileFacts {
    std::string   architecture;
    int64_t       n_layer = 0;
    std::set<int> types;  // ggml types of its tensors
};

// Throws StageError: bad_model.
FileFacts read_facts(const std::string & path);

}  // namespace meshnode
