// What has to be known of a model before the engine opens it.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace meshnode {

struct FileFacts {
    std::string   architecture;
    int64_t       n_layer = 0;
    std::set<int> types;  // ggml types of its tensors, in whichever shard
    int64_t       rope_short_to = 0;  // the longest context with the short of two sets of rotary factors; 0: has not two
};

// Of a file, or of a set of shards in order, the first of which says what the model is. Throws StageError: bad_model.
FileFacts read_facts(const std::vector<std::string> & paths);

}  // namespace meshnode
